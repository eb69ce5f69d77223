import pytest
import torch

from backend.worker import peaks


def test_a_device_without_memory_left_has_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(peaks.torch, "ones", full)
    assert peaks.measured_peaks(torch.device("cpu"), torch.float32, 2**20) is None
