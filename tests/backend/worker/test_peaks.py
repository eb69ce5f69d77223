from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backend.kernels import build
from backend.worker import peaks


def test_a_device_without_memory_left_has_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(peaks.torch, "ones", full)
    assert peaks.measured_peaks(torch.device("cpu"), torch.float32, 2**20) is None


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cpu_is_measured_by_the_products_that_it_computes(
    dtype: torch.dtype, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[torch.dtype]()

    def run_once(device: torch.device, run: Callable[[], Tensor]) -> float:
        found.append(run().dtype)
        return 1.0

    monkeypatch.setattr(peaks, "_fastest", run_once)
    monkeypatch.setattr(build, "multiplies_in_bfloat16", lambda: has_bfloat16)
    peaks.measured_peaks(torch.device("cpu"), dtype, 0)
    assert found[-1] is (torch.bfloat16 if dtype is torch.bfloat16 and has_bfloat16 else torch.float32)
