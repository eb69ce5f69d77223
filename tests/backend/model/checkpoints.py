"""Checkpoints of a small model, whole or in shards."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.model.known_shapes import QWEN3_06B
from backend.model.model_config import ModelConfig
from backend.model.weights import Weights, checkpoint_names, load_weights, random_weights

CONFIG = replace(
    QWEN3_06B,
    vocab_size=40,
    hidden_size=24,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position=64,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=False,
)
TIED = replace(CONFIG, tie_word_embeddings=True)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def tensors(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """A checkpoint's tensors, each value different."""
    names = dict(checkpoint_names(config, random_weights(config, torch.float32)))
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(target.shape, generator=generator) for name, target in names.items()}


def save(directory: Path, stored: dict[str, Tensor]) -> Path:
    save_file(stored, directory / "model.safetensors")
    return directory


def save_sharded(directory: Path, stored: dict[str, Tensor]) -> dict[str, str]:
    """Two shards and their index; returns the index's weight_map."""
    names = sorted(stored)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: stored[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(directory: Path, config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(directory, config, dtype)
