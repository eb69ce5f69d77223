"""Model shapes to measure with random weights: two public ones, as in their config.json, and a small one."""

from dataclasses import replace

from backend.model.model_config import ModelConfig

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    sliding_window=None,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=None,
    eos_token_ids=(),
)

QWEN3_06B = replace(
    LLAMA_3_8B,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    max_position=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
    tie_word_embeddings=True,
)

LLAMA_32M = replace(
    LLAMA_3_8B,
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    rope_theta=10_000.0,
    torch_dtype="float32",
)
