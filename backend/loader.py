"""Loading takes a model from its name to a device that can execute batches."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.kernels.cpu import select_ops
from backend.model.decoder import Decoder
from backend.model.hub import resolve_model
from backend.model.model_config import ModelConfig, read_model_config, read_sampling_defaults
from backend.model.shards import Shards
from backend.model.weights import Weights, load_weights
from backend.paged_kv.block_names import BlockNames
from backend.paged_kv.kv_cache import KVCache, block_bytes
from backend.sizing import DEVICE_TOKEN_BUDGET, EngineOptions, free_memory, size_engine
from backend.structured_output.masks import TokenMasks
from backend.structured_output.process_setup import ProcessSetup, StructuredOutputOptions
from backend.structured_output.processes import GrammarProcesses
from backend.text.tokenizer import Tokenizer
from backend.worker.device_errors import placing
from backend.worker.device_memory import check_fits, expected_memory, free_and_total, measured_memory
from backend.worker.model_runner import ModelRunner

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Progress = Callable[[int, int], None]
"""This is called with (bytes read by now, bytes in all) while weights load."""


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
        return config.num_blocks * block_bytes(self.config, config.block_size, self.runner.kv.dtype)

    def block_names(self, secret: bytes) -> BlockNames:
        """Make the names of blocks of this model's keys and values: those of a revision on a hub are in a directory of
        their own.
        """
        identity = (str(self.directory.resolve()), str(self.dtype), str(self.runner.kv.dtype))
        return BlockNames(secret, self.engine_config.block_size, identity)


def load_model(
    name: str,
    options: EngineOptions,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    structured_output: StructuredOutputOptions | None = None,
    progress: Progress = lambda done, total: None,
) -> LoadedModel:
    """Read, check and place a model. Raises `ModelLoadError` or `ConfigError` before anything is served."""
    directory = resolve_model(name)
    config = read_model_config(directory)
    tokenizer = Tokenizer.from_dir(directory, config.vocab_size)
    defaults = read_sampling_defaults(directory)
    target = select_device(device)
    precision = select_dtype(dtype, config, target)
    _check_size(options, config, precision, target)  # contradictions show before the long load
    if target.type == "cuda" or options.kv_cache_dtype != "auto":
        select_ops(target, precision, kernels, options.cache_dtype(precision))  # and so does what kernels lack
    with placing(target):
        weights = _load(directory, config, precision, target, progress)
        num_parameters = weights.num_parameters
        runner = place_model(config, options, weights, precision, target, kernels)
    constrain(runner, directory, config, structured_output or StructuredOutputOptions())
    return LoadedModel(directory, config, runner.config, tokenizer, runner, precision, num_parameters, defaults)


def constrain(runner: ModelRunner, directory: Path, config: ModelConfig, options: StructuredOutputOptions) -> None:
    """Let answers have grammars; their processes are not started yet."""
    if options.num_processes and config.eos_token_ids:
        path, end_tokens = str(directory / "tokenizer.json"), list(config.eos_token_ids)
        seqs, length = runner.config.max_num_seqs, runner.config.max_model_len
        setup = ProcessSetup(path, config.vocab_size, end_tokens, seqs, length, options)
        runner.masks = TokenMasks(GrammarProcesses(setup), options.jump_forward)


def select_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the first CUDA device, or the CPU if there is none."""
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    if name == "cuda":
        if not available:
            raise ConfigError("device cuda: torch finds none; check the driver and torch's build, or choose cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def select_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type of that name; `auto` is what the checkpoint stores on a GPU, and float32 on a CPU."""
    if name == "auto":
        name = config.torch_dtype if device.type == "cuda" else "float32"
    return DTYPES[name]


def place_model(
    config: ModelConfig,
    options: EngineOptions,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
) -> ModelRunner:
    """Return a runner that takes the weights over, with as much KV memory as fits beside them."""
    kv_dtype = options.cache_dtype(dtype)
    ops = select_ops(device, dtype, kernels, kv_dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
        num_bytes = weights.num_parameters * dtype.itemsize
        decoder = Decoder(config, weights, ops, options.max_model_len or config.max_position)
        engine_config = _size_measured(options, decoder, num_bytes, dtype, device)
    else:
        engine_config = size_engine(options, config, dtype, free_memory())
        decoder = Decoder(config, weights, ops, engine_config.max_model_len)
    kv = KVCache(config, engine_config.num_blocks, engine_config.block_size, kv_dtype, device)
    runner = ModelRunner(decoder, kv, engine_config)
    runner.measure_copies()
    return runner


def _check_size(options: EngineOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> EngineConfig:
    """Return the limits as they are expected to be. Raises `ConfigError` for what cannot work."""
    if device.type != "cuda":
        return size_engine(options, config, dtype, free_memory())
    return size_for_device(options, config, dtype, device)


def size_for_device(
    options: EngineOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> EngineConfig:
    """Return the limits of a model that is to be loaded on a CUDA device. Raises `ConfigError`, with the arithmetic."""
    free, total = free_and_total(device)
    tokens = options.max_num_batched_tokens or DEVICE_TOKEN_BUDGET
    memory = expected_memory(str(device), free, total, config, dtype, tokens, options.max_num_seqs)
    check_fits(memory)
    return size_engine(options, config, dtype, memory.kv_bytes, dedicated=True)


def _size_measured(
    options: EngineOptions, decoder: Decoder, weight_bytes: int, dtype: torch.dtype, device: torch.device
) -> EngineConfig:
    """Return the limits by what is free beside the weights and beside a step of as many tokens as one may have."""
    free, _ = free_and_total(device)
    draft = size_engine(options, decoder.config, dtype, free, dedicated=True)
    tokens, seqs = draft.max_num_batched_tokens, draft.max_num_seqs
    kv_dtype = options.cache_dtype(dtype)
    memory = measured_memory(decoder, device, weight_bytes, tokens, seqs, draft.block_size, kv_dtype)
    check_fits(memory)
    log.info("%s", memory)
    try:
        return size_engine(options, decoder.config, dtype, memory.kv_bytes, dedicated=True)
    except ConfigError as error:
        raise ConfigError(f"{error}; {memory}") from None


def _load(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Weights:
    total = Shards(directory).num_bytes
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return load_weights(directory, config, dtype, device, advance)
