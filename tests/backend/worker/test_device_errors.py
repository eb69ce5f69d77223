import shutil
from collections.abc import Callable
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from backend.errors import ConfigError, DeviceError, MemoryExhausted
from backend.kernels.cpu import select_ops
from backend.scheduler.batch import Batch
from backend.worker.device_errors import placing
from tests.backend.runners import make_runner

DEVICE = torch.device("cuda:0")
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable."


def out_of_resources() -> Exception:
    errors = pytest.importorskip("triton.runtime.errors")
    error: Exception = errors.OutOfResources(131_072, 101_376, "shared memory")
    return error


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be reported late",  # of torch's `AcceleratorError`
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA driver error: out of memory",
    ],
)
def test_a_lack_of_memory_told_only_in_words_has_its_step_planned_again(words: str) -> None:
    assert isinstance(make_runner().failure(3, RuntimeError(words)), MemoryExhausted)


@pytest.mark.parametrize("words", ["CUDA error: an illegal memory access was encountered", "out of memory bounds"])
def test_other_words_of_memory_are_a_failure(words: str) -> None:
    assert not isinstance(make_runner().failure(3, RuntimeError(words)), MemoryExhausted)


LACKS: dict[str, tuple[Callable[[], Exception], str]] = {
    "memory": (
        lambda: torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
        "choose a smaller model",
    ),
    "a compiler": (lambda: RuntimeError(NO_COMPILER), "install gcc"),
    "headers": (lambda: CalledProcessError(1, ["gcc"]), "python3-dev"),
    "shared memory": (out_of_resources, "choose kernels torch"),
}


@pytest.mark.parametrize("what", LACKS)
def test_a_lack_of_the_device_is_told_with_a_remedy(what: str) -> None:
    make, remedy = LACKS[what]
    with pytest.raises(ConfigError, match=f"cannot be placed on cuda:0: .*{remedy}") as raised, placing(DEVICE):
        raise make()
    assert "\n" not in str(raised.value)


def test_other_errors_of_the_device_are_its_failure_and_ours_are_not() -> None:
    with pytest.raises(DeviceError, match="no kernel image"), placing(DEVICE):
        raise RuntimeError("CUDA error: no kernel image is available")
    with pytest.raises(ValueError, match="ours"), placing(DEVICE):
        raise ValueError("ours")
    with pytest.raises(MemoryExhausted), placing(DEVICE):
        raise MemoryExhausted("as it is")


def test_a_kernel_that_does_not_fit_fails_its_step_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()

    def refuse(batch: Batch) -> None:
        raise out_of_resources()

    monkeypatch.setattr(runner, "_launch_step", refuse)
    with pytest.raises(DeviceError, match=r"step 7 failed on cpu: .*choose kernels torch"):
        runner.launch(SimpleNamespace(step=7, stores=True))  # type: ignore[arg-type]


def test_triton_without_a_compiler_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"need a C compiler.*install gcc"):
        select_ops(DEVICE, torch.bfloat16)
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "/opt/cc" else None)
    assert select_ops(DEVICE, torch.bfloat16).captures
