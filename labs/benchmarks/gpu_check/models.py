"""Decoders of known shapes with weights drawn at random on the device itself."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from backend.config import EngineOptions
from backend.kernels.triton_ops import TritonOps
from backend.model.known_shapes import LLAMA_3_8B, QWEN3_06B
from backend.model.model_config import ModelConfig
from backend.model.weights import checkpoint_names, random_weights
from backend.placement import place_model
from backend.scheduler.batch import Batch
from backend.sizing import ModelDemand
from backend.worker.model_runner import ModelRunner

TINY = replace(
    QWEN3_06B,
    vocab_size=600,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=512,
)
SHAPES = {"Llama-3-8B": LLAMA_3_8B, "Qwen3-0.6B": QWEN3_06B, "tiny": TINY}


@dataclass(slots=True)
class Fallback:
    """The way to run models if the usual way fails, for the whole process."""

    kernels: str = "auto"
    has_graphs: bool = True
    kv_gib: float | None = None

    @property
    def kv_bytes(self) -> int | None:
        return None if self.kv_gib is None else int(self.kv_gib * 2**30)


FALLBACK = Fallback()


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_runner(model: ModelConfig, options: EngineOptions, device: torch.device) -> ModelRunner:
    """A runner, warmed up, over weights of seed 0."""
    dtype = dtype_of(device)
    torch.cuda.empty_cache()  # or the weights would be laid into what is kept of a runner let go, and hold on to it
    with torch.inference_mode():
        weights = random_weights(model, dtype, 0, device)
    options = replace(options, kv_memory_bytes=options.kv_memory_bytes or FALLBACK.kv_bytes)
    captures = nullcontext() if FALLBACK.has_graphs else patch.object(TritonOps, "captures", False)
    with captures:
        runner = place_model(ModelDemand(options, model, dtype), weights, device, FALLBACK.kernels)
    runner.warm_up()
    return runner


def poison_given_up(runner: ModelRunner) -> None:
    """Have blocks hold NaN once they are copied to the host: a step that still read them would show it."""
    swapper = runner.swapper
    assert swapper is not None
    copy = swapper.copy

    def copy_and_poison(batch: Batch) -> None:
        copy(replace(batch, swap_in=[]))
        for block, _ in batch.swap_out:
            runner.kv.blocks[block] = torch.nan
        copy(replace(batch, swap_out=[]))

    swapper.copy = copy_and_poison  # type: ignore[method-assign]


def write_checkpoint(model: ModelConfig, directory: Path, device: torch.device) -> None:
    """The same weights in Hugging Face layout, with a tokenizer of one word for each token."""
    dtype = dtype_of(device)
    weights = random_weights(model, dtype, 0, device)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in checkpoint_names(model, weights)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(model, dtype)))
    words = {f"w{token}": token for token in range(model.vocab_size)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    split = {"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": []}
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (directory / "tokenizer.json").write_text(json.dumps(absent | split | tokenizer))


def _config(model: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": [model.architecture],
        "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
