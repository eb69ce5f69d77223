"""Places a model's weights on a device, with as much KV memory as fits beside them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from backend.config import EngineConfig, EngineOptions
from backend.errors import ConfigError
from backend.kernels.cpu import PACKING, select_ops
from backend.model.adapter_checkpoint import num_places
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig
from backend.model.weights import Weights, with_products_apart
from backend.paged_kv.kv_cache import KVCache
from backend.parallel.rank_group import Parallel
from backend.roofline import Footprint, recorded_bytes, show_bytes
from backend.sizing import DEVICE_TOKEN_BUDGET, ModelDemand, free_memory, size_engine
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


def place_model(demand: ModelDemand, weights: Weights, device: torch.device, kernels: str = "auto") -> ModelRunner:
    """Return a runner that takes the weights over."""
    return place_part(demand, weights, device, kernels, None, ModelRunner)


def size_beside(first: ModelRunner, demand: ModelDemand, name: str) -> EngineConfig:
    """Return the limits of a further model in the KV memory of the first; its sequences may be as long as the model
    allows. Raises `ConfigError` for one of that name which does not fit.
    """
    model, options, groups, config = demand.model, demand.options, demand.groups, first.config
    num_blocks, needed = config.num_blocks, 1 + groups.num_windows
    if needed > num_blocks:
        each = first.kv.memory.shape[1]
        raise ConfigError(
            f"the model {name} does not fit: a sequence takes {needed} blocks of KV memory at least, "
            f"{show_bytes(needed * each)}, and there are {show_bytes(num_blocks * each)}: raise kv_memory_bytes"
        )
    if first.device.type == "cuda":
        check_packing(demand, first.device)
        dtype = str(demand.dtype).removeprefix("torch.")
        weights = Footprint(model, dtype, quantization=options.quantization).weight_bytes
        free, _ = free_and_total(first.device)
        if weights > free:
            raise ConfigError(
                f"the model {name} does not fit: its weights take {show_bytes(weights)}, and {show_bytes(free)} of "
                f"{first.device} are free: lower kv_memory_bytes, or choose smaller models"
            )
    limits = replace(config, max_model_len=1, window_groups=groups.num_windows, window_tokens=demand.window)
    capacity = limits.window_need.places(num_blocks) * limits.block_size
    longest = min(model.max_position, options.max_model_len or model.max_position, capacity)
    return replace(limits, max_model_len=longest)


def place_beside(
    first: ModelRunner, limits: EngineConfig, demand: ModelDemand, weights: Weights, kernels: str = "auto"
) -> ModelRunner:
    """Return a runner of a further model, with the limits of `size_beside`."""
    model, options, groups, longest = demand.model, demand.options, demand.groups, limits.max_model_len
    num_blocks, block_size = limits.num_blocks, limits.block_size
    ops = select_ops(first.device, demand.dtype, kernels, demand.kv_dtype, options.quantization)
    decoder = Decoder(model, with_products_apart(weights, first.device), ops, longest, groups=groups)
    memory, layers = first.kv.memory, groups.size
    kv = KVCache(model, num_blocks, block_size, demand.kv_dtype, first.device, memory=memory, num_layers=layers)
    runner = ModelRunner(decoder, kv, limits, beside=first)
    runner.measure_adapters()
    return runner


def place_part(
    demand: ModelDemand,
    weights: Weights,
    device: torch.device,
    kernels: str,
    parallel: Parallel | None,
    make_runner: Callable[[Decoder, KVCache, EngineConfig], Runner],
) -> Runner:
    """Return a runner of the whole model, or of one rank's part of it; the limits of all ranks are then those of the
    whole model.
    """
    options, model, groups = demand.options, demand.model, demand.groups
    ops = select_ops(device, demand.dtype, kernels, demand.kv_dtype, options.quantization)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
        num_bytes = weights.num_parameters * demand.dtype.itemsize - demand.packed_away
        weights = with_products_apart(weights, device)
        decoder = Decoder(model, weights, ops, options.max_model_len or model.max_position, parallel, groups)
        config = _size_measured(demand, decoder, num_bytes, device)
    else:
        free = free_memory()
        if parallel is not None:
            free = parallel.group.least(free, device)
        config = size_engine(demand, free)
        decoder = Decoder(model, weights, ops, config.max_model_len, parallel, groups)
    num_blocks, block_size, least = config.num_blocks, config.block_size, demand.least_block_bytes
    kv = KVCache(decoder.config, num_blocks, block_size, demand.kv_dtype, device, least, num_layers=groups.size)
    runner = make_runner(decoder, kv, config)
    runner.measure_copies()
    runner.measure_adapters()
    return runner


def check_size(demand: ModelDemand, device: torch.device) -> EngineConfig:
    """Return the expected limits. Raises `ConfigError` for options that cannot work."""
    return size_for_device(demand, device) if device.type == "cuda" else size_engine(demand, free_memory())


def size_for_device(demand: ModelDemand, device: torch.device) -> EngineConfig:
    """Return the limits of a model that is to be loaded on CUDA devices, a shard on this one. Raises `ConfigError`,
    with the arithmetic.
    """
    options, part = demand.options, demand.part
    if options.speculate != "off":  # a step with drafts runs without a CUDA graph, which no price of a draft knows
        raise ConfigError(
            f"speculate {options.speculate} is for CPUs, and the device is {device}: leave it off on a GPU"
        )
    check_packing(demand, device)
    free, total = free_and_total(device)
    tokens = options.max_num_batched_tokens or DEVICE_TOKEN_BUDGET
    memory = expected_memory(str(device), free, total, demand, tokens)
    check_fits(memory)
    free = memory.kv_bytes - _adapter_bytes(demand, part, tokens)
    return size_engine(demand, _pool_bytes(free, part, demand.whole), True)


def check_packing(demand: ModelDemand, device: torch.device) -> None:
    """Raise `ConfigError` for a model whose weights a GPU does not keep packed."""
    options = demand.options
    if options.quantization not in PACKING:
        return
    if demand.shard is not None or demand.model.experts is not None:
        what = "with experts" if demand.shard is None else "of several ranks"
        raise ConfigError(
            f"quantization {options.quantization} on {device}: weights of a model {what} are not packed there; leave "
            "it auto"
        )


def loading_device(options: EngineOptions, device: torch.device) -> torch.device:
    """Return the device to which weights are read: the host, if they are packed one by one on their way to `device`."""
    return torch.device("cpu") if options.quantization in PACKING else device


def _size_measured(demand: ModelDemand, decoder: Decoder, weight_bytes: int, device: torch.device) -> EngineConfig:
    """Return the limits by the bytes that are free beside the weights and beside a step of the most tokens; with
    several ranks, on the rank that has the least.
    """
    parallel = decoder.parallel

    def shared(num_bytes: int) -> int:
        """Return the bytes for keys and values on all ranks, of which each has at least its part of `num_bytes`."""
        all_bytes = _pool_bytes(num_bytes, decoder.config, demand.whole)
        return all_bytes if parallel is None else parallel.group.least(all_bytes, device)

    free, _ = free_and_total(device)
    draft = size_engine(demand, shared(free), True)
    tokens, seqs = draft.max_num_batched_tokens, draft.max_num_seqs
    memory = measured_memory(decoder, device, weight_bytes, tokens, seqs, draft.block_size, demand.kv_dtype)
    check_fits(memory)
    log.info("%s", memory)
    try:
        free = memory.kv_bytes - _adapter_bytes(demand, decoder.config, tokens)
        return size_engine(demand, shared(free), True)
    except ConfigError as error:
        raise ConfigError(f"{error}; {memory}") from None


def _adapter_bytes(demand: ModelDemand, model: ModelConfig, tokens: int) -> int:
    """Return the bytes of a device that adapters take beside their weights: the places of their vectors, and graphs of
    the steps that have some.
    """
    options = demand.options
    if not options.max_adapter_rank:
        return 0
    places = options.max_num_seqs * model.num_layers * num_places(options.max_adapter_rank) * 8
    return places + recorded_bytes(model, tokens, options.max_num_seqs)


def _pool_bytes(part_bytes: int, part: ModelConfig, whole: ModelConfig) -> int:
    """Return the bytes of all heads of keys and values where `part` of them have `part_bytes`."""
    return part_bytes * whole.num_kv_heads // part.num_kv_heads
