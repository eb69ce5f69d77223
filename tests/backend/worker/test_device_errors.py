"""What a device lacks ends in an error that says what helps, and what is our mistake stays as it is."""

import shutil
from collections.abc import Callable
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from backend import loader
from backend.errors import ConfigError, DeviceError, MemoryExhausted
from backend.kernels.cpu import select_ops
from backend.kernels.reference import ReferenceOps, cast_to_cache
from backend.kernels.torch_ops import TorchOps
from backend.loader import load_model
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.sizing import EngineOptions
from backend.worker.device_errors import placing
from tests.backend.runners import generate, make_runner

DEVICE = torch.device("cuda:0")
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable."


def out_of_resources() -> Exception:
    errors = pytest.importorskip("triton.runtime.errors")
    error: Exception = errors.OutOfResources(131_072, 101_376, "shared memory")
    return error


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
def test_what_the_device_lacks_for_a_model_is_told_with_what_helps(what: str) -> None:
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


def test_no_memory_for_weights_ends_a_load_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_load", full)
    with pytest.raises(ConfigError, match="lower kv_memory_bytes"):
        load_model("embedded", EngineOptions(), device="cpu", kernels="torch")


def test_a_kernel_that_does_not_fit_fails_its_step_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()

    def refuse(batch: Batch) -> None:
        raise out_of_resources()

    monkeypatch.setattr(runner, "_launch_step", refuse)
    with pytest.raises(DeviceError, match=r"step 7 failed on cpu: .*choose kernels torch"):
        runner.launch(SimpleNamespace(step=7))  # type: ignore[arg-type]


def test_triton_without_a_compiler_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"need a C compiler.*install gcc"):
        select_ops(DEVICE, torch.bfloat16)
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "/opt/cc" else None)
    assert select_ops(DEVICE, torch.bfloat16).captures


def test_plain_torch_and_the_reference_read_the_same_from_8_bits() -> None:
    prompts, sampling = [[5, 9, 2], [7] * 11], [SamplingParams(temperature=0, max_tokens=6)] * 2
    runners = [make_runner(ops, kv_dtype=torch.float8_e4m3fn) for ops in (TorchOps(), ReferenceOps())]
    first, second = (generate(runner, prompts, sampling) for runner in runners)
    assert first == second
    assert torch.equal(*(runner.kv.blocks.float() for runner in runners))


def test_numbers_beyond_8_bits_are_stored_as_the_largest() -> None:
    stored = cast_to_cache(torch.tensor([1e4, -500.0, 0.1]), torch.float8_e4m3fn)
    assert stored.float().tolist() == [448.0, -448.0, 0.1015625]


def test_a_cpu_keeps_keys_and_values_in_8_bits_where_it_is_told_to() -> None:
    wide, narrow = (EngineOptions(kv_cache_dtype=kind, kv_memory_bytes=2**24) for kind in ("auto", "fp8"))
    model = load_model("embedded", narrow, device="cpu")
    same = load_model("embedded", wide, device="cpu", kernels="torch")
    assert model.runner.kv.dtype == torch.float8_e4m3fn
    assert model.engine_config.num_blocks >= 4 * same.engine_config.num_blocks
    assert model.kv_bytes <= 2**24
    with pytest.raises(ConfigError, match="kv_cache_dtype auto"):
        load_model("embedded", narrow, device="cpu", kernels="native")
