"""A model, from its name to a device that can execute batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.checkpoint import Checkpoint
from backend.config import EngineConfig
from backend.generation_config import read_sampling_defaults
from backend.hub import resolve_model
from backend.kernels.cpu import select_ops
from backend.model import Decoder
from backend.model_config import ModelConfig, read_model_config
from backend.model_runner import ModelRunner
from backend.paged_kv.kv_cache import KVCache, block_bytes
from backend.sizing import EngineOptions, free_memory, size_engine
from backend.tokenizer import Tokenizer
from backend.weights import Weights, load_weights

DTYPES = {"auto": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Progress = Callable[[int, int], None]
"""Called with (bytes read by now, bytes in all) while weights load."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything of a model that outlives a request."""

    directory: Path
    config: ModelConfig
    engine_config: EngineConfig
    tokenizer: Tokenizer
    runner: ModelRunner
    dtype: torch.dtype
    num_parameters: int
    sampling_defaults: Mapping[str, Any]  # what a request that leaves a field of SamplingParams unsaid gets

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids)

    @property
    def kv_bytes(self) -> int:
        config = self.engine_config
        return config.num_blocks * block_bytes(self.config, config.block_size, self.dtype)


def load_model(
    name: str,
    options: EngineOptions,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    progress: Progress = lambda done, total: None,
) -> LoadedModel:
    """Read, check and place a model. Raises `ModelLoadError` or `ConfigError` before anything is served."""
    directory = resolve_model(name)
    config = read_model_config(directory)
    tokenizer = Tokenizer.from_dir(directory, config.vocab_size)
    defaults = read_sampling_defaults(directory)
    target = torch.device("cpu" if device == "auto" else device)
    precision = DTYPES[dtype]
    size_engine(options, config, precision, free_memory())  # contradictions show before the long load
    weights = _load(directory, config, precision, target, progress)
    num_parameters = weights.num_parameters
    engine_config = size_engine(options, config, precision, free_memory())
    runner = make_runner(config, engine_config, weights, precision, target, kernels)
    return LoadedModel(directory, config, engine_config, tokenizer, runner, precision, num_parameters, defaults)


def make_runner(
    config: ModelConfig,
    engine_config: EngineConfig,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
) -> ModelRunner:
    """A runner over weights, which it takes over."""
    ops = select_ops(device, dtype, kernels)
    decoder = Decoder(config, weights, ops, engine_config.max_model_len)
    kv = KVCache(config, engine_config.num_blocks, engine_config.block_size, dtype, device)
    return ModelRunner(decoder, kv, engine_config)


def _load(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Weights:
    total = Checkpoint(directory).num_bytes
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return load_weights(directory, config, dtype, device, advance)
