"""How a GPU's memory is divided, and how what does not fit is refused; with figures of a device that is not there."""

from dataclasses import replace

import pytest
import torch

from backend import loader
from backend.errors import ConfigError
from backend.loader import select_device
from backend.roofline import RUNTIME_BYTES
from backend.sizing import EngineOptions, size_engine
from backend.worker.device_memory import (
    DeviceMemory,
    check_fits,
    expected_memory,
    measured_memory,
    recorded_bytes,
    rehearsal,
    slot_bytes,
)
from benchmarks.model_shapes import LLAMA_3_8B
from tests.backend.runners import MODEL, make_runner

GIB = 2**30


def memory(total: int) -> DeviceMemory:
    return expected_memory("cuda:0", total - GIB, total, LLAMA_3_8B, torch.bfloat16, 2048, 256)


def test_the_arithmetic_adds_up_to_the_memory() -> None:
    found = memory(80 * GIB)
    parts = found.weights + found.activations + found.graphs + found.slots + found.reserve + found.kv_bytes
    assert parts + GIB == found.total
    assert "cuda:0 has 80.00 GiB - weights 14.96 GiB - in use otherwise 1.00 GiB" in str(found)


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    check_fits(memory(24 * GIB))
    with pytest.raises(ConfigError, match=r"does not fit: cuda:0 has 16\.00 GiB - weights 14\.96 GiB .* = -"):
        check_fits(memory(16 * GIB))


def test_a_device_of_its_own_gives_all_that_its_sequences_can_use() -> None:
    options, kv_bytes = EngineOptions(max_num_seqs=256), memory(80 * GIB).kv_bytes
    engine = size_engine(options, LLAMA_3_8B, torch.bfloat16, kv_bytes, dedicated=True)
    assert engine.num_blocks == kv_bytes // (131_072 * 16)
    assert engine.max_num_batched_tokens == 2048
    few = size_engine(replace(options, max_num_seqs=4), LLAMA_3_8B, torch.bfloat16, kv_bytes, dedicated=True)
    assert few.num_blocks == 4 * 8192 // 16


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


def test_memory_is_measured_around_a_step_with_nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def told(name: str, result: object) -> None:
        def call(*_: object) -> object:
            calls.append(name)
            return result

        monkeypatch.setattr(torch.cuda, name, call)

    told("synchronize", None)
    told("reset_peak_memory_stats", None)
    told("memory_reserved", 1000)
    told("max_memory_reserved", 1700)
    told("empty_cache", None)
    told("mem_get_info", (5 * RUNTIME_BYTES, 6 * RUNTIME_BYTES))
    decoder, cpu = make_runner().decoder, torch.device("cpu")
    memory = measured_memory(decoder, cpu, weights=500, tokens=20, seqs=3, block_size=4)
    recorded = recorded_bytes(MODEL, tokens=20, seqs=3)
    assert (memory.activations, memory.graphs) == (700, 700 + recorded)
    assert memory.kv_bytes == 4 * RUNTIME_BYTES - 2 * 700 - recorded - memory.slots
    step = ["empty_cache", "reset_peak_memory_stats", "memory_reserved", "synchronize", "max_memory_reserved"]
    assert calls == ["synchronize", *step, "empty_cache", "mem_get_info"]


def test_the_step_that_measures_stores_nothing_and_runs() -> None:
    runner = make_runner()
    step = rehearsal(50, runner.config.block_size, 30, torch.device("cpu"))
    hidden = runner.decoder.forward(step, runner.kv)
    assert hidden.shape == (50, MODEL.hidden_size)
    assert not runner.kv.blocks[:-1].any()


def test_slots_take_their_logits_and_penalties() -> None:
    assert slot_bytes(LLAMA_3_8B, 256) == 256 * 128_256 * (4 + 1 + 4)


def test_graphs_take_memory_by_their_number_and_their_layers() -> None:
    assert recorded_bytes(LLAMA_3_8B, 2048, 256) == (12 * 4 + 35) * 32 * 11 * 16_384
    assert recorded_bytes(replace(LLAMA_3_8B, num_layers=64), 2048, 256) == 2 * recorded_bytes(LLAMA_3_8B, 2048, 256)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch finds none"):
        select_device("cuda")


def test_a_gpu_serves_what_the_checkpoint_stores_and_a_cpu_float32() -> None:
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        assert loader.select_dtype("auto", LLAMA_3_8B, torch.device(device)) == dtype
    assert loader.select_dtype("float16", LLAMA_3_8B, torch.device("cuda")) == torch.float16


def test_a_size_below_one_block_is_answered_with_what_would_do() -> None:
    said = r"less than one block of 16 tokens \(2\.00 MiB\): 1\.00 GiB hold one sequence of 8,192 tokens.*such as 2GiB"
    with pytest.raises(ConfigError, match=said):
        size_engine(EngineOptions(kv_memory_bytes=2), LLAMA_3_8B, torch.bfloat16, 2**40)
