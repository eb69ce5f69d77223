"""Loads a model, from its name to a runner that can execute batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.config import EngineConfig, EngineOptions
from backend.errors import ConfigError
from backend.kernels.cpu import select_ops
from backend.model.hub import resolve_model
from backend.model.model_config import ModelConfig, read_model_config, read_sampling_defaults
from backend.model.shards import Shards
from backend.model.weights import empty_weights, load_weights
from backend.paged_kv.block_names import BlockNames
from backend.paged_kv.kv_cache import block_bytes
from backend.parallel.loading import load_leading
from backend.parallel.shard import Shard, pooled
from backend.placement import (
    check_size,
    loading_device,
    place_beside,
    place_model,
    select_device,
    select_dtype,
    size_beside,
)
from backend.sizing import ModelDemand
from backend.structured_output.masks import TokenMasks
from backend.structured_output.process_setup import ProcessSetup, StructuredOutputOptions
from backend.structured_output.processes import GrammarProcesses
from backend.text.tokenizer import ChatControlTokens, Tokenizer
from backend.worker.device_errors import placing
from backend.worker.model_runner import ModelRunner

Progress = Callable[[int, int], None]
"""The callback for (bytes read so far, bytes in all) while weights load."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The parts of a model that outlive a request."""

    directory: Path
    config: ModelConfig
    engine_config: EngineConfig
    tokenizer: Tokenizer
    runner: ModelRunner
    dtype: torch.dtype
    num_parameters: int
    sampling_defaults: Mapping[str, Any]  # values of the SamplingParams fields that a request leaves out
    shard: Shard | None = None  # this process's part of the model, if it is one of several ranks

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids)

    @property
    def kv_bytes(self) -> int:
        """The bytes of the KV memory, which all models share."""
        config = self.engine_config
        kv = self.runner.kv
        own = block_bytes(pooled(self.config, self.shard), config.block_size, kv.dtype, kv.blocks.shape[1])
        return config.num_blocks * max(own, kv.memory.shape[1])

    def block_names(self, secret: bytes, beside: BlockNames | None = None, number: int = 0) -> BlockNames:
        """Make the names of blocks of this model's keys and values, the model of that `number` in the engine. Each
        revision on a hub has a directory of its own, and so other names.
        """
        identity = (str(self.directory.resolve()), str(self.dtype), str(self.runner.kv.dtype))
        apart = (str(number),) if number else ()
        return BlockNames(secret, self.engine_config.block_size, (*identity, *apart), beside)


def load_model(
    name: str,
    options: EngineOptions,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    tensor_parallel: int = 1,
    chat_control_tokens: ChatControlTokens = "text",
    structured_output: StructuredOutputOptions | None = None,
    progress: Progress = lambda done, total: None,
    least_block_bytes: int = 0,
    beside: ModelRunner | None = None,
) -> LoadedModel:
    """Read, check and place a model, on `tensor_parallel` ranks: on a machine with GPUs each has one. Of several
    models, all but the first lie `beside` it, in blocks of `least_block_bytes`.

    Raises `ModelLoadError` or `ConfigError` before anything is served.
    """
    if tensor_parallel > 1 and options.max_adapter_rank:
        raise ConfigError("adapters are served by one rank: leave tensor_parallel 1, or serve none")
    directory = resolve_model(name)
    config = read_model_config(directory)
    tokenizer = Tokenizer.from_dir(directory, config.vocab_size, chat_control_tokens)
    defaults = read_sampling_defaults(directory)
    target = select_device(device, tensor_parallel)
    precision = select_dtype(dtype, config, target)
    shard = Shard.of(config, 0, tensor_parallel) if tensor_parallel > 1 else None
    demand = ModelDemand(options, config, precision, shard, least_block_bytes)
    # contradictions show before the long load
    limits = check_size(demand, target) if beside is None else size_beside(beside, demand, directory.name)
    if options.quantization == "stored" and not any(directory.glob("*.gguf")):
        raise ConfigError(f"quantization stored is of GGUF files, and {name} is none: choose int4, int8, fp8 or auto")
    if target.type == "cuda" or options.kv_cache_dtype != "auto" or options.quantization not in ("auto", "none"):
        # and so does a lack of kernels
        select_ops(target, precision, kernels, demand.kv_dtype, options.quantization)
    advance = _advance(Shards(directory).num_bytes, progress)
    runner: ModelRunner
    with placing(target):
        if shard is not None:
            num_parameters = empty_weights(config, precision, torch.device("meta")).num_parameters
            runner = load_leading(tensor_parallel, directory, config, options, precision, target, kernels, advance)
        else:
            keeps_integers = options.quantization == ("auto" if target.type == "cpu" else "stored")
            read_to = loading_device(options, target)
            weights = load_weights(directory, config, precision, read_to, advance, keeps_integers=keeps_integers)
            num_parameters = weights.num_parameters
            if beside is not None:
                runner = place_beside(beside, limits, demand, weights, kernels)
            else:
                runner = place_model(demand, weights, target, kernels)
    constrain(runner, directory, config, structured_output or StructuredOutputOptions())
    return LoadedModel(directory, config, runner.config, tokenizer, runner, precision, num_parameters, defaults, shard)


def shared_block_bytes(directories: Sequence[Path], options: EngineOptions, dtype: str, device: str) -> int:
    """Return the bytes of a block that holds keys and values of each of these models. Raises `ModelLoadError`, and
    `ConfigError` for options that several models cannot have.
    """
    target = select_device(device)
    if target.type == "cuda" and options.kv_memory_bytes is None:
        raise ConfigError(
            "several models on a GPU need --kv-memory-bytes: the memory for their keys and values, of which the first "
            "model would else take all that is free"
        )
    configs = [read_model_config(directory) for directory in directories]
    each = [ModelDemand(options, config, select_dtype(dtype, config, target)).own_block_bytes for config in configs]
    return -(-max(each) // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES


BLOCK_ALIGNMENT_BYTES = 64  # of shared blocks: a line of a CPU's cache


def constrain(runner: ModelRunner, directory: Path, config: ModelConfig, options: StructuredOutputOptions) -> None:
    """Allow answers to have grammars; the grammar processes are not started yet."""
    if options.num_processes and config.eos_token_ids:
        path = str((directory / "tokenizer.json").absolute())  # a program may be in another folder by then
        end_tokens = list(config.eos_token_ids)
        seqs, length = runner.config.max_num_seqs, runner.config.max_model_len
        setup = ProcessSetup(path, config.vocab_size, end_tokens, seqs, length, options)
        runner.masks = TokenMasks(GrammarProcesses(setup), options.jump_forward)


def _advance(total: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that is told the bytes of each part read, and tells `progress` the sum."""
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return advance
