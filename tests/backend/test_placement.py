"""Placing a model: what fits a device, and what is said where it does not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from backend import placement
from backend.config import EngineOptions
from backend.errors import ConfigError
from backend.model.known_shapes import LLAMA_3_8B
from backend.model.model_config import ExpertsConfig
from backend.parallel.shard import Shard
from backend.placement import _size_measured, check_size, select_device, select_dtype, size_beside
from backend.sizing import ModelDemand
from backend.worker.device_memory import DeviceMemory
from backend.worker.model_runner import ModelRunner
from tests.backend.runners import MODEL, make_runner

GIB = 2**30


def test_impossible_options_are_refused_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * GIB, 16 * GIB))
    with pytest.raises(ConfigError, match="the model does not fit"):
        check_size(ModelDemand(EngineOptions(), LLAMA_3_8B, torch.bfloat16), torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (17 * GIB, 18 * GIB))
    options = EngineOptions(max_num_seqs=16, max_model_len=8192)
    with pytest.raises(ConfigError, match="max_model_len 8192 needs 512 blocks"):
        check_size(ModelDemand(options, LLAMA_3_8B, torch.bfloat16), torch.device("cuda:0"))


def test_a_further_model_that_does_not_fit_is_named_before_its_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    small, demand = make_runner(), ModelDemand(EngineOptions(), LLAMA_3_8B, torch.bfloat16)
    kv = SimpleNamespace(memory=torch.empty(small.config.num_blocks, 2**10, device="meta"))
    first = cast(ModelRunner, SimpleNamespace(config=small.config, kv=kv, device=torch.device("cuda:0")))
    with pytest.raises(ConfigError, match=r"the model big does not fit: its weights take 14\.96 GiB, and 3\.00 GiB of"):
        size_beside(first, demand, "big")
    groups = SimpleNamespace(num_windows=small.config.num_blocks)
    windowed = cast(ModelDemand, SimpleNamespace(model=MODEL, options=EngineOptions(), groups=groups, window=16))
    blocks = small.config.num_blocks
    with pytest.raises(
        ConfigError, match=f"the model m does not fit: a sequence takes {blocks + 1} blocks of KV memory"
    ):
        size_beside(first, windowed, "m")


def test_drafts_are_refused_on_a_gpu() -> None:
    demand = ModelDemand(EngineOptions(speculate="lookup"), LLAMA_3_8B, torch.bfloat16)
    with pytest.raises(
        ConfigError, match="speculate lookup is for CPUs, and the device is cuda:0: leave it off on a GPU"
    ):
        check_size(demand, torch.device("cuda:0"))


def test_weights_that_a_gpu_does_not_pack_are_refused_there_and_no_others() -> None:
    options, gpu = EngineOptions(quantization="int4"), torch.device("cuda:0")
    experts = replace(LLAMA_3_8B, experts=ExpertsConfig(8, 2, True))
    with pytest.raises(ConfigError, match="quantization int4 on cuda:0: weights of a model with experts are"):
        check_size(ModelDemand(options, experts, torch.bfloat16), gpu)
    shard = Shard.of(LLAMA_3_8B, 0, 2)
    with pytest.raises(ConfigError, match="quantization int4 on cuda:0: weights of a model of several ranks are not"):
        check_size(ModelDemand(options, LLAMA_3_8B, torch.bfloat16, shard), gpu)
    placement.check_packing(ModelDemand(EngineOptions(), experts, torch.bfloat16, shard), gpu)


def test_a_model_fits_a_gpu_by_the_bytes_of_its_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read are they to the host; 16 bits a weight would take 15 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 11 * GIB))
    options = EngineOptions(max_num_seqs=8, max_model_len=2048)
    gpu = torch.device("cuda:0")
    with pytest.raises(ConfigError, match="the model does not fit"):
        check_size(ModelDemand(options, LLAMA_3_8B, torch.bfloat16), gpu)
    packing = replace(options, quantization="int4")
    assert check_size(ModelDemand(packing, LLAMA_3_8B, torch.bfloat16), gpu).max_model_len == 2048
    assert placement.loading_device(packing, gpu).type == "cpu"
    assert placement.loading_device(options, gpu) == gpu


def test_limits_that_do_not_fit_what_was_measured_are_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = DeviceMemory("cuda:0", 2 * GIB, GIB + 10_000, GIB // 2, 3_000, 2_000, 0, GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(placement, "measured_memory", lambda *arguments: full)
    decoder, options = make_runner().decoder, EngineOptions(max_num_seqs=2, max_model_len=64)
    with pytest.raises(ConfigError, match=r"needs 4 blocks.*; cuda:0 has 2\.00 GiB - weights 512\.00 MiB"):
        _size_measured(ModelDemand(options, MODEL, torch.float32), decoder, GIB // 2, torch.device("cuda:0"))


def test_memory_of_a_model_that_was_let_go_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [2 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB - sum(kept), 2 * GIB))
    room = DeviceMemory("cuda:0", 2 * GIB, 2 * GIB, 0, 0, 0, 0, GIB)
    monkeypatch.setattr(placement, "measured_memory", lambda *arguments: room)
    decoder, options = make_runner().decoder, EngineOptions(max_num_seqs=2, max_model_len=64)
    engine = _size_measured(ModelDemand(options, MODEL, torch.float32), decoder, 0, torch.device("cuda:0"))
    assert engine.num_blocks == 2 * 64 // 16


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch finds none"):
        select_device("cuda")


def test_a_gpu_serves_what_the_checkpoint_stores_and_a_cpu_float32() -> None:
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        assert select_dtype("auto", LLAMA_3_8B, torch.device(device)) == dtype
    assert select_dtype("float16", LLAMA_3_8B, torch.device("cuda")) == torch.float16


def test_each_rank_is_sized_by_its_part_and_all_by_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * GIB, 16 * GIB))
    shard, options = Shard.of(LLAMA_3_8B, 1, 2), EngineOptions(max_num_seqs=64, max_model_len=8192)
    engine = check_size(ModelDemand(options, LLAMA_3_8B, torch.bfloat16, shard), torch.device("cuda:0"))
    held = engine.num_blocks * engine.block_size * 131_072  # bytes a token, of all heads
    assert 10 * GIB < held < 16 * GIB, "each rank has half of the heads, and some 6 GiB beside half of the weights"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert select_device("auto", 3) == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="tensor_parallel 4: each rank has a GPU of its own, and torch finds 3"):
        select_device("cuda", 4)
