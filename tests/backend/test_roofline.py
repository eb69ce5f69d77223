"""The plan's arithmetic, against the weights that are really made and against figures worked out apart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend.config import EngineOptions
from backend.errors import ConfigError
from backend.model.known_shapes import LLAMA_3_8B, QWEN3_06B
from backend.model.model_config import ExpertsConfig, ModelConfig, read_model_config
from backend.model.weights import empty_weights
from backend.paged_kv.kv_cache import block_bytes
from backend.roofline import GPUS, RUNTIME_BYTES, Footprint, MemoryPlan, Roofline
from backend.sizing import ModelDemand, size_engine
from tests.backend.families import FAMILIES

H200 = GPUS["h200"]
LLAMA = Footprint(LLAMA_3_8B, "bfloat16")


@pytest.mark.parametrize("family", [name for name in FAMILIES if "dynamic" not in name])
def test_weights_are_counted_as_they_are_made(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    config.architectures = [type(config).__name__.replace("Text", "").replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    made = empty_weights(model, torch.float32, torch.device("meta"))
    assert Footprint(model, "float32").num_weights == made.num_parameters


@pytest.mark.parametrize(("quantization", "bits"), [("int4", 5), ("int8", 8.5), ("fp8", 8)])
def test_packed_weights_are_read_and_kept_in_fewer_bits_but_those_of_embedding_and_head(
    quantization: str, bits: float
) -> None:
    packed = replace(LLAMA, quantization=quantization)
    products = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336)
    assert LLAMA.weight_bytes - packed.weight_bytes == int(products * (2 - bits / 8))
    assert LLAMA.bytes_read(1) - packed.bytes_read(1) == int(products * (2 - bits / 8))
    plain, faster = Roofline(LLAMA, H200), Roofline(packed, H200)
    assert faster.decode(1, 0) == pytest.approx(packed.bytes_read(1) / H200.bandwidth)
    assert faster.prefill(8192) == plain.prefill(8192), "as many products"
    assert faster.ridge == pytest.approx(plain.ridge * packed.bytes_read(1) / LLAMA.bytes_read(1))


def test_kv_bytes_are_those_of_the_pool() -> None:
    assert LLAMA.kv_bytes(1000) == 63 * block_bytes(LLAMA_3_8B, 16, torch.bfloat16)


def test_a_plan_counts_of_layers_with_a_window_what_it_sees() -> None:
    windowed = replace(LLAMA_3_8B, sliding_window=512, full_attention_layers=frozenset(range(16)))
    half = block_bytes(LLAMA_3_8B, 16, torch.bfloat16) // 2
    footprint = Footprint(windowed, "bfloat16")
    assert footprint.kv_bytes(8192) == (512 + 512 // 16 + 64 // 16 + 1) * half
    assert footprint.tokens_in(footprint.kv_bytes(8192)) == 8192
    assert replace(footprint, longest=1024).kv_bytes(1024) == 64 * 2 * half, "none is longer than two windows"


@pytest.mark.parametrize("longest", [None, 1024, 8192])
def test_a_plan_fits_what_an_engine_accepts(longest: int | None) -> None:
    windowed = replace(LLAMA_3_8B, sliding_window=512, full_attention_layers=frozenset(range(16)))
    for memory in range(18, 24):
        plan = MemoryPlan.make(Footprint(windowed, "bfloat16"), memory * 2**30, longest, 64, 2048)
        options = EngineOptions(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=longest)
        config = size_engine(
            ModelDemand(replace(options, kv_memory_bytes=plan.kv_bytes), windowed, torch.bfloat16), 2**40
        )
        assert config.max_model_len == plan.max_model_len
        assert config.num_blocks * plan.footprint.block_bytes <= plan.kv_bytes
        needed = config.kv_blocks(config.max_model_len) * plan.footprint.block_bytes
        assert plan.bytes_per_sequence == needed <= plan.kv_bytes
        if longest:
            with pytest.raises(ConfigError):
                size_engine(ModelDemand(replace(options, kv_memory_bytes=needed - 1), windowed, torch.bfloat16), 2**40)
            left = plan.memory - plan.kv_bytes + needed
            assert MemoryPlan.make(Footprint(windowed, "bfloat16"), left, longest, 64, 2048).kv_bytes == needed
            with pytest.raises(ConfigError):
                MemoryPlan.make(Footprint(windowed, "bfloat16"), left - 1, longest, 64, 2048)


@pytest.mark.parametrize(
    ("model", "batch", "milliseconds", "tokens_per_second"),
    [
        (LLAMA_3_8B, 1, 3.52, 283.94),
        (LLAMA_3_8B, 64, 5.49, 11_661),
        (LLAMA_3_8B, 256, 12.85, 19_915),
        (QWEN3_06B, 1, 0.30, 3_284),
        (QWEN3_06B, 64, 2.03, 31_603),
        (QWEN3_06B, 256, 7.38, 34_697),
    ],
)
def test_the_floor_of_a_decode_step_on_an_h200(
    model: ModelConfig, batch: int, milliseconds: float, tokens_per_second: float
) -> None:
    seconds = Roofline(Footprint(model, "bfloat16"), H200).decode(batch, 1024)
    assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.006)
    assert batch / seconds == pytest.approx(tokens_per_second, rel=2e-4)


@pytest.mark.parametrize(("model", "milliseconds"), [(LLAMA_3_8B, 19.46), (QWEN3_06B, 1.545)])
def test_the_floor_of_a_prefill_on_an_h200(model: ModelConfig, milliseconds: float) -> None:
    assert Roofline(Footprint(model, "bfloat16"), H200).prefill(1024) * 1e3 == pytest.approx(milliseconds, rel=1e-3)


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    moe = replace(  # Qwen3-30B-A3B
        QWEN3_06B,
        hidden_size=2048,
        intermediate_size=768,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        tie_word_embeddings=False,
        experts=ExpertsConfig(128, 8, normalises=True),
    )
    footprint = Footprint(moe, "bfloat16")
    assert footprint.num_weights == pytest.approx(30.53e9, rel=1e-3)
    assert footprint.num_multiplied + 2048 * 151_936 == pytest.approx(3.35e9, rel=2e-3)
    assert footprint.bytes_read(1) == pytest.approx(2 * footprint.num_multiplied)
    assert footprint.bytes_read(16) == pytest.approx(2 * (1.23e9 + 28.99e9 * 0.644), rel=2e-3)  # 82 of 128 experts
    assert footprint.bytes_read(4096) == pytest.approx(2 * footprint.num_read)


def test_the_ridge_is_where_products_take_as_long_as_reading_the_weights() -> None:
    roofline = Roofline(LLAMA, H200)
    assert roofline.ridge == pytest.approx(183.7, abs=0.05)
    assert roofline.prefill(183) == roofline.prefill(1) < roofline.prefill(185)


def test_a_windowed_layer_reads_its_window() -> None:
    windowed = replace(LLAMA_3_8B, sliding_window=512, full_attention_layers=frozenset(range(16)))
    read = Footprint(windowed, "bfloat16").kv_bytes_read(2048)
    assert read == 131_072 * (2048 + 512) // 2
    assert Footprint(windowed, "bfloat16").kv_bytes_read(100) == 131_072 * 100


def test_memory_is_divided_without_remainder_or_overlap() -> None:
    plan = MemoryPlan.make(LLAMA, 80 * 2**30, None, 256, 2048)
    parts = plan.footprint.weight_bytes + plan.working_bytes + plan.graph_bytes + RUNTIME_BYTES + plan.kv_bytes
    assert parts == plan.memory
    assert plan.max_model_len == LLAMA_3_8B.max_position
    assert plan.sequences_of(plan.max_model_len) * plan.bytes_per_sequence <= plan.kv_bytes


def test_a_context_that_is_not_asked_for_shrinks_to_the_memory() -> None:
    plan = MemoryPlan.make(LLAMA, 17 * 2**30, None, 16, 512)
    assert 16 <= plan.max_model_len < LLAMA_3_8B.max_position
    assert plan.sequences_of(plan.max_model_len) == 1


def test_more_sequences_than_memory_holds_are_warned_of() -> None:
    assert MemoryPlan.make(LLAMA, 80 * 2**30, 1024, 64, 2048).warnings == []
    (warning,) = MemoryPlan.make(LLAMA, 80 * 2**30, 8192, 256, 2048).warnings
    assert "holds 62 sequences of 8,192 tokens, not max_num_seqs 256: that many fit up to 2,000 tokens each" in warning
    (warning,) = MemoryPlan.make(LLAMA, 23 * 2**30, 512, 4000, 4000).warnings
    assert "is never reached" in warning


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"16\.00 GiB of memory - weights 14\.96 GiB - .* a smaller model"):
        MemoryPlan.make(LLAMA, 16 * 2**30, None, 256, 2048)
    with pytest.raises(ConfigError, match=r"needs 2\.00 MiB: smaller max_num_seqs or max_num_batched_tokens"):
        MemoryPlan.make(LLAMA, 80 * 2**30, None, 100_000, 100_000)
    with pytest.raises(ConfigError, match=r"needs 2\.00 MiB: a smaller model, or more memory"):
        MemoryPlan.make(LLAMA, 12 * 2**30, None, 256, 2048)
    with pytest.raises(ConfigError, match="lower max_model_len to"):
        MemoryPlan.make(LLAMA, 17 * 2**30, 8192, 16, 512)


def test_a_step_of_decodes_alone_has_the_floor_of_decodes_and_a_prompt_adds_its_pairs() -> None:
    roofline = Roofline(LLAMA, H200)
    assert roofline.step(64, 64, 64 * 1024, 0) == pytest.approx(roofline.decode(64, 1024))
    attention = roofline.step(1024, 1024, 0, 1024 * 1025 // 2) - roofline.prefill(1024)
    assert attention == pytest.approx(4 * 32 * 32 * 128 * 524_800 / 790e12)


def test_a_step_makes_logits_of_sampled_rows_alone() -> None:
    roofline = Roofline(LLAMA, H200)
    saved = roofline.prefill(1024) - roofline.step(1024, 1, 0, 0)
    assert saved == pytest.approx(2 * 4096 * 128_256 * 1023 / 790e12)


def test_a_step_sees_no_more_than_windows_let_it() -> None:
    windowed = replace(LLAMA_3_8B, sliding_window=512, full_attention_layers=frozenset(range(16)))
    roofline = Roofline(Footprint(windowed, "bfloat16"), H200)
    beyond = roofline.beyond_window([2047, 99], [])
    step = roofline.step(2, 2, 2048 + 100, 0, beyond)
    read = sum(map(roofline.footprint.kv_bytes_read, (2048, 100)))
    assert step - roofline.step(2, 2, 0, 0) == pytest.approx(read / H200.bandwidth)
    seen = sum(min(position + 1, 512) for position in range(300, 1324))
    assert roofline.beyond_window([], [(300, 1024)]) == (0, sum(range(301, 1325)) - seen)
    assert roofline.beyond_window([], [(700, 8)]) == (188, sum(range(701, 709)) - 8 * 512)
    assert Roofline(LLAMA, H200).beyond_window([9000], [(9000, 8)]) == (0, 0)
