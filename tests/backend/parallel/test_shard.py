"""Shards divide a model: each part is one rank's, and none is left out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import ConfigError
from backend.model.known_shapes import LLAMA_32M
from backend.model.model_config import ModelConfig
from backend.parallel.shard import Shard

shapes = st.builds(
    lambda kv_heads, group, hidden, vocab: replace(
        LLAMA_32M,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * group,
        intermediate_size=hidden,
        vocab_size=vocab,
        head_dim=8,
    ),
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 8),
    hidden=st.integers(16, 700),
    vocab=st.integers(81, 500),
)


@given(shapes, st.integers(1, 9))
def test_each_part_is_one_ranks_and_every_query_head_has_its_keys_there(config: ModelConfig, size: int) -> None:
    group = config.num_heads // config.num_kv_heads
    if size > config.num_heads:
        with pytest.raises(ConfigError, match=f"tensor_parallel {size}: the model has {config.num_heads} attention"):
            Shard.of(config, 0, size)
        return
    shards = [Shard.of(config, rank, size) for rank in range(size)]
    for parts, count in (
        ([shard.heads for shard in shards], config.num_heads),
        ([shard.intermediate for shard in shards], config.intermediate_size),
        ([shard.vocab for shard in shards], config.vocab_size),
    ):
        assert [number for part in parts for number in part] == list(range(count))
        assert all(parts)
    for shard in shards:
        part = shard.part_of(config)
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert part.num_heads % part.num_kv_heads == 0
    assert sum(len(shard.kv_heads) for shard in shards) == shards[0].all_kv_heads == max(size, config.num_kv_heads)


def test_products_are_cut_by_outputs_into_a_block_and_by_inputs_out_of_it() -> None:
    config = replace(LLAMA_32M, num_heads=8, num_kv_heads=4, head_dim=16, intermediate_size=256, vocab_size=1000)
    shard = Shard.of(config, 1, 2)
    layer = "model.layers.3."
    assert shard.slices(layer + "self_attn.q_proj.weight", config) == (slice(64, 128),)
    assert shard.slices(layer + "self_attn.v_proj.bias", config) == (slice(32, 64),)
    assert shard.slices(layer + "self_attn.o_proj.weight", config) == (slice(None), slice(64, 128))
    assert shard.slices(layer + "mlp.down_proj.weight", config) == (slice(None), slice(128, 256))
    assert shard.slices("model.embed_tokens.weight", config) == (slice(500, 1000),)
    for whole in ("self_attn.o_proj.bias", "mlp.down_proj.bias", "input_layernorm.weight", "self_attn.q_norm.weight"):
        assert shard.slices(layer + whole, config) == ()
    assert shard.slices("model.norm.weight", config) == ()
    assert shard.slices(layer + "mlp.experts.unknown", config) == ()
