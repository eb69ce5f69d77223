"""How a GPU's memory is divided, and how what does not fit is refused; with figures of a device that is not there."""

from dataclasses import replace

import pytest
import torch

from backend.config import EngineOptions
from backend.errors import ConfigError
from backend.model.known_shapes import LLAMA_3_8B
from backend.paged_kv.layer_groups import LayerGroups
from backend.roofline import RUNTIME_BYTES, Footprint, MemoryPlan
from backend.sizing import ModelDemand, size_engine
from backend.worker.device_memory import (
    DeviceMemory,
    check_fits,
    expected_memory,
    measured_memory,
    recorded_bytes,
    rehearsal,
    slot_bytes,
)
from tests.backend.runners import CONFIG, MODEL, make_runner

GIB = 2**30


def memory(total: int) -> DeviceMemory:
    return expected_memory("cuda:0", total - GIB, total, ModelDemand(EngineOptions(), LLAMA_3_8B, torch.bfloat16), 2048)


def test_block_tables_of_layers_with_a_window_are_counted_before_anything_is_loaded() -> None:
    windowed = replace(LLAMA_3_8B, sliding_window=512, full_attention_layers=frozenset(range(16)))
    demand = ModelDemand(EngineOptions(max_num_seqs=256), windowed, torch.bfloat16)
    found = expected_memory("cuda:0", 79 * GIB, 80 * GIB, demand, 2048)
    assert found.slots == slot_bytes(windowed, 256) + (256 + 256 + 16) * (windowed.max_position // 16) * 4
    plan = MemoryPlan.make(Footprint(windowed, "bfloat16"), 80 * GIB, None, 256, 2048)
    tables = replace(plan, footprint=Footprint(LLAMA_3_8B, "bfloat16")).kv_bytes - plan.kv_bytes
    assert tables == (256 + 256 + 16) * (windowed.max_position // 16) * 4


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
    engine = size_engine(ModelDemand(options, LLAMA_3_8B, torch.bfloat16), kv_bytes, dedicated=True)
    assert engine.num_blocks == kv_bytes // (131_072 * 16)
    assert engine.max_num_batched_tokens == 2048
    few = size_engine(
        ModelDemand(replace(options, max_num_seqs=4), LLAMA_3_8B, torch.bfloat16), kv_bytes, dedicated=True
    )
    assert few.num_blocks == 4 * 8192 // 16


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
    places = -(-CONFIG.max_model_len // 4)
    assert memory.slots == slot_bytes(MODEL, 3)
    decoder.groups = LayerGroups(2, ((0, 0), (0, 1), (1, 0), (2, 0)))
    grouped = measured_memory(decoder, cpu, weights=500, tokens=20, seqs=3, block_size=4)
    assert grouped.slots == memory.slots + 2 * (3 + 3 + 16) * places * 4, "block tables of two groups"
    del calls[len(calls) // 2 :]
    step = ["empty_cache", "reset_peak_memory_stats", "memory_reserved", "synchronize", "max_memory_reserved"]
    assert calls == ["synchronize", *step, "empty_cache", "mem_get_info"]


def test_the_step_that_measures_stores_nothing_and_runs() -> None:
    runner = make_runner()
    step = rehearsal(50, runner.config.block_size, 30, torch.device("cpu"))
    hidden = runner.decoder.forward(step, runner.kv)
    assert hidden.shape == (50, MODEL.hidden_size)
    assert not runner.kv.blocks[:-1].any()


def test_slots_take_their_logits_log_probabilities_and_penalties_beside_a_slice_of_a_prompts() -> None:
    assert slot_bytes(LLAMA_3_8B, 256) == 256 * 128_256 * (4 + 4 + 1 + 1 + 4 + 2 / 8) + 3 * 2**25


def test_graphs_take_memory_by_their_number_and_their_layers() -> None:
    assert recorded_bytes(LLAMA_3_8B, 2048, 256) == (12 * 4 + 35) * 32 * 11 * 16_384
    assert recorded_bytes(replace(LLAMA_3_8B, num_layers=64), 2048, 256) == 2 * recorded_bytes(LLAMA_3_8B, 2048, 256)
