"""Places a model's weights on a device, with as much KV memory as fits beside them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from backend.config import EngineConfig, EngineOptions
from backend.errors import ConfigError
from backend.kernels.cpu import select_ops
from backend.model.adapter_checkpoint import num_places
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig
from backend.model.weights import Weights
from backend.paged_kv.kv_cache import KVCache
from backend.parallel.rank_group import Parallel
from backend.parallel.shard import Shard, pooled
from backend.roofline import recorded_bytes
from backend.sizing import DEVICE_TOKEN_BUDGET, cache_dtype, free_memory, kv_groups, size_engine
from backend.worker.device_memory import check_fits, expected_memory, free_and_total, measured_memory
from backend.worker.model_runner import ModelRunner

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Runner = TypeVar("Runner", bound=ModelRunner)


def select_device(name: str, num_ranks: int = 1) -> torch.device:
    """Return the device of that name; `auto` is the first CUDA device, or the CPU if there is none.

    Raises `ConfigError` if there are fewer devices than ranks.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    if name != "cuda":
        return torch.device(name)
    if not available:
        raise ConfigError("device cuda: torch finds none; check the driver and torch's build, or choose cpu")
    if num_ranks == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if (count := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(f"tensor_parallel {num_ranks}: each rank has a GPU of its own, and torch finds {count}")
    return torch.device("cuda", 0)


def select_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type of that name; `auto` is the checkpoint's type on a GPU, and float32 on a CPU."""
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
    least_block_bytes: int = 0,
) -> ModelRunner:
    """Return a runner that takes the weights over. `least_block_bytes`: of a block, which other models share."""
    return place_part(config, options, weights, dtype, device, kernels, None, ModelRunner, least_block_bytes)


def place_beside(
    first: ModelRunner,
    config: ModelConfig,
    options: EngineOptions,
    weights: Weights,
    dtype: torch.dtype,
    kernels: str = "auto",
) -> ModelRunner:
    """Return a runner of a further model, in the KV memory and with the limits of the first; its sequences may be as
    long as the model allows.
    """
    kv_dtype, limits = cache_dtype(options, dtype), first.config
    longest = min(
        config.max_position, options.max_model_len or config.max_position, limits.num_blocks * limits.block_size
    )
    limits = replace(limits, max_model_len=longest)
    ops = select_ops(first.device, dtype, kernels, kv_dtype, options.quantization)
    decoder = Decoder(config, weights, ops, longest)
    memory = first.kv.memory
    kv = KVCache(decoder.config, limits.num_blocks, limits.block_size, kv_dtype, first.device, memory=memory)
    return ModelRunner(decoder, kv, limits, first.device_stream, first.swapper)


def place_part(
    config: ModelConfig,
    options: EngineOptions,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    parallel: Parallel | None,
    make_runner: Callable[[Decoder, KVCache, EngineConfig], Runner],
    least_block_bytes: int = 0,
) -> Runner:
    """Return a runner of the whole model, or of one rank's part of it; the limits of all ranks are then those of the
    whole model.
    """
    kv_dtype = cache_dtype(options, dtype)
    ops = select_ops(device, dtype, kernels, kv_dtype, options.quantization)
    groups = kv_groups(options, config, is_shared=least_block_bytes > 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
        num_bytes = weights.num_parameters * dtype.itemsize
        decoder = Decoder(config, weights, ops, options.max_model_len or config.max_position, parallel, groups)
        engine_config = _size_measured(options, config, decoder, num_bytes, dtype, device, least_block_bytes)
    else:
        free, shard = free_memory(), None
        if parallel is not None:
            free, shard = parallel.group.least(free, device), parallel.shard
        engine_config = size_engine(options, pooled(config, shard), dtype, free, least_block_bytes=least_block_bytes)
        decoder = Decoder(config, weights, ops, engine_config.max_model_len, parallel, groups)
    num_blocks, block_size = engine_config.num_blocks, engine_config.block_size
    kv = KVCache(decoder.config, num_blocks, block_size, kv_dtype, device, least_block_bytes, num_layers=groups.size)
    runner = make_runner(decoder, kv, engine_config)
    runner.measure_copies()
    runner.measure_adapters()
    return runner


def check_size(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
    least_block_bytes: int = 0,
) -> EngineConfig:
    """Return the expected limits. Raises `ConfigError` for options that cannot work."""
    if device.type == "cuda":
        return size_for_device(options, config, dtype, device, shard, least_block_bytes)
    return size_engine(options, pooled(config, shard), dtype, free_memory(), least_block_bytes=least_block_bytes)


def size_for_device(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
    least_block_bytes: int = 0,
) -> EngineConfig:
    """Return the limits of a model that is to be loaded on CUDA devices, a `shard` on this one. Raises `ConfigError`,
    with the arithmetic.
    """
    free, total = free_and_total(device)
    tokens = options.max_num_batched_tokens or DEVICE_TOKEN_BUDGET
    part, whole = config if shard is None else shard.stored(config), pooled(config, shard)
    memory = expected_memory(str(device), free, total, part, dtype, tokens, options.max_num_seqs)
    check_fits(memory)
    free = memory.kv_bytes - _adapter_bytes(options, part, tokens)
    return size_engine(options, whole, dtype, _pool_bytes(free, part, whole), True, least_block_bytes)


def _size_measured(
    options: EngineOptions,
    config: ModelConfig,
    decoder: Decoder,
    weight_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    least_block_bytes: int = 0,
) -> EngineConfig:
    """Return the limits by the bytes that are free beside the weights and beside a step of the most tokens; with
    several ranks, on the rank that has the least.
    """
    parallel = decoder.parallel
    whole = pooled(config, None if parallel is None else parallel.shard)

    def shared(num_bytes: int) -> int:
        """Return the bytes for keys and values on all ranks, of which each has at least its part of `num_bytes`."""
        all_bytes = _pool_bytes(num_bytes, decoder.config, whole)
        return all_bytes if parallel is None else parallel.group.least(all_bytes, device)

    free, _ = free_and_total(device)
    draft = size_engine(options, whole, dtype, shared(free), True, least_block_bytes)
    tokens, seqs = draft.max_num_batched_tokens, draft.max_num_seqs
    kv_dtype = cache_dtype(options, dtype)
    memory = measured_memory(decoder, device, weight_bytes, tokens, seqs, draft.block_size, kv_dtype)
    check_fits(memory)
    log.info("%s", memory)
    try:
        free = memory.kv_bytes - _adapter_bytes(options, decoder.config, tokens)
        return size_engine(options, whole, dtype, shared(free), True, least_block_bytes)
    except ConfigError as error:
        raise ConfigError(f"{error}; {memory}") from None


def _adapter_bytes(options: EngineOptions, model: ModelConfig, tokens: int) -> int:
    """Return the bytes of a device that adapters take beside their weights: the places of their vectors, and graphs of
    the steps that have some.
    """
    if not options.max_adapter_rank:
        return 0
    places = options.max_num_seqs * model.num_layers * num_places(options.max_adapter_rank) * 8
    return places + recorded_bytes(model, tokens, options.max_num_seqs)


def _pool_bytes(part_bytes: int, part: ModelConfig, whole: ModelConfig) -> int:
    """Return the bytes of all heads of keys and values where `part` of them have `part_bytes`."""
    return part_bytes * whole.num_kv_heads // part.num_kv_heads
