from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backend.kernels import reference
from backend.kernels.ops import Ops
from backend.kernels.reference import ReferenceOps
from backend.kernels.self_check import disagreements
from backend.kernels.triton_ops import TritonOps
from tests.backend.kernels.interpreted.closeness import DTYPES, assert_close

EPS = 1e-5
Rowwise = Callable[[Ops, Tensor, Tensor], Tensor]
ROWWISE: dict[str, Rowwise] = {
    "rms_norm": lambda ops, x, weight: ops.rms_norm(x, weight, EPS),
    "add_rms_norm": lambda ops, x, weight: ops.add_rms_norm(x, x.flip(0).contiguous(), weight, EPS),
    "silu_mul": lambda ops, x, _: ops.silu_mul(x),
}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 514, 3000])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise_operations_are_the_references(name: str, rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn((rows, size), generator=generator) * 4).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    assert_close(ROWWISE[name](TritonOps(), x, weight), ROWWISE[name](ReferenceOps(), x, weight))


def test_add_rms_norm_leaves_the_sum_in_the_residual() -> None:
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    expected = x + residual
    TritonOps().add_rms_norm(x, residual, torch.ones(64), EPS)
    torch.testing.assert_close(residual, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_pass_through_the_activation_as_in_the_reference(dtype: torch.dtype) -> None:
    gate = torch.tensor([[0.0, -0.0, 88.0, -88.0, 200.0, -200.0, 6e4, -6e4, 6e-8, -6e-8, torch.inf, torch.nan]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1).to(dtype)
    torch.testing.assert_close(TritonOps().silu_mul(gate_up), reference.silu_mul(gate_up), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_what_we_ship(dtype: torch.dtype) -> None:
    assert disagreements(TritonOps(), dtype) == []
