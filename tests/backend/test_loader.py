import pytest
import torch

from backend import loader
from backend.errors import ConfigError
from backend.loader import load_model, select_device
from backend.sizing import EngineOptions
from backend.worker.device_memory import DeviceMemory
from benchmarks.model_shapes import LLAMA_3_8B
from tests.backend.runners import make_runner

GIB = 2**30


def test_what_cannot_work_is_refused_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * GIB, 16 * GIB))
    with pytest.raises(ConfigError, match="the model does not fit"):
        loader._check_size(EngineOptions(), LLAMA_3_8B, torch.bfloat16, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (17 * GIB, 18 * GIB))
    options = EngineOptions(max_num_seqs=16, max_model_len=8192)
    with pytest.raises(ConfigError, match="max_model_len 8192 needs 512 blocks"):
        loader._check_size(options, LLAMA_3_8B, torch.bfloat16, torch.device("cuda:0"))


def test_limits_that_do_not_fit_what_was_measured_are_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = DeviceMemory("cuda:0", 2 * GIB, GIB + 10_000, GIB // 2, 3_000, 2_000, 0, GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(loader, "measured_memory", lambda *arguments: full)
    decoder, options = make_runner().decoder, EngineOptions(max_num_seqs=2, max_model_len=64)
    with pytest.raises(ConfigError, match=r"needs 4 blocks.*; cuda:0 has 2\.00 GiB - weights 512\.00 MiB"):
        loader._size_measured(options, decoder, GIB // 2, torch.float32, torch.device("cuda:0"))


def test_memory_of_a_model_that_was_let_go_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [2 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB - sum(kept), 2 * GIB))
    room = DeviceMemory("cuda:0", 2 * GIB, 2 * GIB, 0, 0, 0, 0, GIB)
    monkeypatch.setattr(loader, "measured_memory", lambda *arguments: room)
    decoder, options = make_runner().decoder, EngineOptions(max_num_seqs=2, max_model_len=64)
    engine = loader._size_measured(options, decoder, 0, torch.float32, torch.device("cuda:0"))
    assert engine.num_blocks == 2 * 64 // 16


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch finds none"):
        select_device("cuda")


def test_a_gpu_serves_what_the_checkpoint_stores_and_a_cpu_float32() -> None:
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        assert loader.select_dtype("auto", LLAMA_3_8B, torch.device(device)) == dtype
    assert loader.select_dtype("float16", LLAMA_3_8B, torch.device("cuda")) == torch.float16


def test_no_memory_for_weights_ends_a_load_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_load", full)
    with pytest.raises(ConfigError, match="lower kv_memory_bytes"):
        load_model("embedded", EngineOptions(), device="cpu", kernels="torch")


def test_a_cpu_keeps_keys_and_values_in_8_bits_where_it_is_told_to() -> None:
    wide, narrow = (EngineOptions(kv_cache_dtype=kind, kv_memory_bytes=2**24) for kind in ("auto", "fp8"))
    model = load_model("embedded", narrow, device="cpu")
    same = load_model("embedded", wide, device="cpu", kernels="torch")
    assert model.runner.kv.dtype == torch.float8_e4m3fn
    assert model.engine_config.num_blocks >= 4 * same.engine_config.num_blocks
    assert model.kv_bytes <= 2**24
    with pytest.raises(ConfigError, match="kv_cache_dtype auto"):
        load_model("embedded", narrow, device="cpu", kernels="native")
