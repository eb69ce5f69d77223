import pytest
import torch

from backend.kernels import reference
from backend.kernels.cpu import CpuOps, select_ops
from backend.kernels.ops import Ops
from backend.kernels.self_check import batch_dependent, disagreements
from backend.kernels.torch_ops import TorchOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_memory")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_at_load_accepts_what_we_ship(native: CpuOps, dtype: torch.dtype) -> None:
    assert batch_dependent(native, dtype) == []
    assert native.batch_invariant


def test_the_check_at_load_names_what_depends_on_the_batch(native: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = native.paged_attention
    monkeypatch.setattr(native, "silu_mul", lambda x: x + x.shape[0])
    monkeypatch.setattr(native, "paged_attention", lambda q, *others: plain(q, *others) * (1 + q.shape[0] % 2))
    assert batch_dependent(native, torch.float32) == ["silu_mul", "clamped_mul", "paged_attention"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_what_we_ship(ops: Ops, dtype: torch.dtype) -> None:
    assert disagreements(ops, dtype) == []


def test_the_self_check_names_a_function_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, native: CpuOps
) -> None:
    monkeypatch.setattr(CpuOps, "silu_mul", lambda self, x: reference.silu_mul(x) + 1)
    assert disagreements(native, torch.float32) == ["experts", "silu_mul"]
    assert isinstance(select_ops(torch.device("cpu"), torch.float32), TorchOps)
    assert "silu_mul" in caplog.text
