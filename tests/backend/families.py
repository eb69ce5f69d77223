"""Tiny random checkpoints of every family we load, made by transformers: the oracle of the decoder's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
_GEMMA = _SHAPE | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "pad_token_id": None}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def _llama(**keys: Any) -> LlamaConfig:
    return LlamaConfig(**(_SHAPE | keys))


def _scaled(kind: str, **keys: Any) -> LlamaConfig:
    return _llama(rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **keys})


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama2": lambda: _llama(num_key_value_heads=6),
    "llama-gqa-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-one-kv-head-wide": lambda: _llama(num_key_value_heads=1, head_dim=32),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama3-scaling": lambda: _scaled("llama3", **_LLAMA3),
    "linear-scaling": lambda: _scaled("linear", factor=2.5),
    "dynamic-scaling": lambda: _scaled("dynamic", factor=2.0),
    "yarn-scaling": lambda: _scaled("yarn", **_YARN),
    "yarn-mscale": lambda: _scaled("yarn", **_YARN, mscale=0.7, mscale_all_dim=1.3, truncate=False, beta_fast=8.0),
    "mistral-window": lambda: MistralConfig(**_SHAPE, sliding_window=7),
    "mistral-no-window": lambda: MistralConfig(**_SHAPE, sliding_window=None, head_dim=10),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-window-tied": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SHAPE, head_dim=16, moe_intermediate_size=40, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "qwen3-moe-unnormalised": lambda: Qwen3MoeConfig(
        **_SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=1, tie_word_embeddings=True
    ),
    "gemma3": lambda: Gemma3TextConfig(**(_GEMMA | {"num_hidden_layers": 6, "query_pre_attn_scalar": 16})),
    "gemma3-scaling": lambda: Gemma3TextConfig(
        **_GEMMA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    ),
    "gpt-oss": lambda: GptOssConfig(
        **(_SHAPE | {"intermediate_size": 64}),
        head_dim=16,
        sliding_window=7,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150_000.0, **_YARN, "truncate": False},
    ),
    "qwen3-biases-tied": lambda: Qwen3Config(**_SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


def random_model(family: str) -> PreTrainedModel:
    """A model none of whose parameters is neutral: norms differ from 1, biases from 0, activations are of order 1."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.eval()
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


@torch.no_grad()
def likeliest(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the likeliest token after the prompt and after each of an answer's tokens but the last: the answer itself,
    if it is greedy. One run takes a twentieth of the time that `generate` takes for as many tokens.
    """
    logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()  # type: ignore[no-any-return]


def save_checkpoint(family: str, directory: Path) -> Path:
    """A random model, with a tokenizer of a word for each token."""
    random_model(family).save_pretrained(directory)
    words = tokenizers.models.WordLevel({f"w{n}": n for n in range(_SHAPE["vocab_size"])}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    return directory
