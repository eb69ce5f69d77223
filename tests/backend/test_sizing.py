from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend import sizing
from backend.config import EngineOptions, KVAllocation, WindowNeed
from backend.errors import ConfigError
from backend.model.known_shapes import LLAMA_3_8B
from backend.paged_kv.layer_groups import layer_groups
from backend.placement import check_size
from backend.sizing import ModelDemand, size_engine


def test_a_size_below_one_block_is_answered_with_what_would_do() -> None:
    said = r"less than one block of 16 tokens \(2\.00 MiB\): 1\.00 GiB hold one sequence of 8,192 tokens.*such as 2GiB"
    with pytest.raises(ConfigError, match=said):
        size_engine(ModelDemand(EngineOptions(kv_memory_bytes=2), LLAMA_3_8B, torch.bfloat16), 2**40)


def test_pages_of_files_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 1\ninactive_file 300000\nactive_file 50000\n"
    for name, text in {"max": "1000000", "current": "900000", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(sizing, "CONTROL_GROUP", tmp_path)
    assert sizing.free_memory() == 450_000
    (tmp_path / "memory.max").write_text("max")
    assert sizing.free_memory() > 450_000


# Gemma 3 270M: fifteen layers of eighteen see 512 tokens
GEMMA = replace(
    LLAMA_3_8B,
    hidden_size=640,
    intermediate_size=2048,
    num_layers=18,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    max_position=32_768,
    sliding_window=512,
    full_attention_layers=frozenset({5, 11, 17}),
)


def test_layers_with_a_window_have_blocks_of_their_own_of_the_size_of_all_others() -> None:
    options = EngineOptions(kv_memory_bytes=2**30, max_num_seqs=8)
    config = size_engine(ModelDemand(options, GEMMA, torch.bfloat16), 2**40)
    assert (config.window_groups, config.window_tokens, config.num_blocks) == (5, 512, 2**30 // (3 * 16 * 1024))
    assert config.kv_tokens > 5 * 2**30 // (18 * 1024), "five times the tokens in the same memory"
    places, most = 32_768 // 16, config.window_need.most
    assert config.kv_blocks(32_768) == places + 5 * most and most < 105


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (EngineOptions(max_model_len=1024), "no text is longer than two windows"),
        (EngineOptions(kv_allocation=KVAllocation.CONTIGUOUS), "a run of memory is one text's own"),
        (EngineOptions(block_size=1, max_adapter_rank=8), "a vector of an adapter would not fit a block"),
    ],
)
def test_all_layers_share_blocks_where_a_window_frees_none(options: EngineOptions, why: str) -> None:
    demand = ModelDemand(EngineOptions(kv_memory_bytes=2**30), GEMMA, torch.bfloat16)
    assert replace(demand, options=options).groups.num_windows == 0
    assert replace(demand, options=EngineOptions(max_adapter_rank=8)).groups.num_windows == 5
    assert check_size(replace(demand, least_block_bytes=2**20), torch.device("cpu")).window_groups == 0


def test_groups_fill_the_blocks_of_another_model() -> None:
    layer = 16 * 1024  # bytes, of 16 tokens
    demand = ModelDemand(EngineOptions(kv_memory_bytes=2**30), GEMMA, torch.bfloat16)
    for room, groups in ((2, 5), (3, 5), (4, 4), (9, 1), (17, 1), (18, 0)):
        config = check_size(replace(demand, least_block_bytes=room * layer), torch.device("cpu"))
        assert (config.window_groups, config.num_blocks) == (groups, 2**30 // (max(room, 3) * layer))


def test_memory_for_fewer_blocks_than_groups_is_refused_with_what_one_place_takes() -> None:
    options = EngineOptions(kv_memory_bytes=3 * 3 * 16 * 1024, max_num_seqs=1)
    with pytest.raises(ConfigError, match=r"less than one block of 16 tokens \(288\.00 KiB\): 119\.91 MiB hold"):
        size_engine(ModelDemand(options, GEMMA, torch.bfloat16), 2**40)


def test_memory_too_small_for_a_text_and_its_window_is_refused_with_both() -> None:
    options = EngineOptions(kv_memory_bytes=2**26, max_num_seqs=4, max_model_len=32_768)
    with pytest.raises(ConfigError, match=r"needs 2558 blocks = .*lower max_model_len to 13680"):
        size_engine(ModelDemand(options, GEMMA, torch.bfloat16), 2**40)
    shorter = size_engine(ModelDemand(replace(options, max_model_len=13_680), GEMMA, torch.bfloat16), 2**40)
    assert shorter.kv_blocks(13_680) == shorter.num_blocks


@given(st.integers(0, 40), st.integers(1, 60), st.integers(0, 500))
def test_places_are_the_most_whose_blocks_fit(groups: int, most: int, blocks: int) -> None:
    need = WindowNeed(groups, most, most)
    places = need.places(blocks)
    assert need.blocks(places) <= blocks < need.blocks(places + 1)


@given(st.lists(st.one_of(st.none(), st.just(8)), min_size=1, max_size=70), st.integers(0, 80))
def test_each_layer_has_a_place_of_its_own_and_none_without_a_window_is_freed(
    windows: list[int | None], room: int
) -> None:
    groups, alone = layer_groups(windows, room), layer_groups(windows).size
    assert alone <= groups.size <= max(room, alone)
    assert len(set(groups.places)) == len(windows)
    assert all(index < groups.size for _, index in groups.places)
    assert all(group == 0 for (group, _), window in zip(groups.places, windows, strict=True) if window is None)
    assert groups.size * (1 + groups.num_windows) <= len(windows) * 9 / 8
