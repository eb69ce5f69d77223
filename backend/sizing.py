"""Derives the limits of one engine from an operator's options, the model and the free memory."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from backend.config import WINDOW_ALIGNMENT_TOKENS, EngineConfig, EngineOptions, KVAllocation, WindowNeed, window_need
from backend.errors import ConfigError
from backend.model.adapter_checkpoint import ALIGNMENT_NUMBERS
from backend.model.model_config import ModelConfig
from backend.paged_kv.block_pool import blocks_for
from backend.paged_kv.kv_cache import block_bytes
from backend.paged_kv.layer_groups import LayerGroups, groups_of, one_group
from backend.parallel.shard import Shard, pooled
from backend.roofline import GIB, Footprint, show_bytes

MAX_ITEM_BYTES = 4  # of a number
DEFAULT_KV_BYTES = GIB  # unless a quarter of the free memory, or all that max_num_seqs can use, is less
CPU_TOKEN_BUDGET = 512
DEVICE_TOKEN_BUDGET = 2048  # on a device of its own, whose products need some hundred rows to be efficient


def cache_dtype(options: EngineOptions, dtype: torch.dtype) -> torch.dtype:
    """Return the type of keys and values of a model computed in `dtype`: the same, or e4m3 of 8 bits."""
    return torch.float8_e4m3fn if options.kv_cache_dtype == "fp8" else dtype


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The model to be served from a device's memory, in this precision, and an operator's options."""

    options: EngineOptions
    model: ModelConfig
    dtype: torch.dtype
    shard: Shard | None = None  # of it on this device; None: all
    least_block_bytes: int = 0  # of a block, which other models share; 0: none does

    @property
    def whole(self) -> ModelConfig:
        """The shape whose keys and values are those of all ranks together."""
        return pooled(self.model, self.shard)

    @property
    def part(self) -> ModelConfig:
        """The shape whose weights take as much memory as this rank's."""
        return self.model if self.shard is None else self.shard.stored(self.model)

    @property
    def kv_dtype(self) -> torch.dtype:
        return cache_dtype(self.options, self.dtype)

    @property
    def packed_away(self) -> int:
        """The bytes of weights that quantization saves on a GPU."""
        dtype = str(self.dtype).removeprefix("torch.")
        return Footprint(self.part, dtype, quantization=self.options.quantization).packed_away

    @property
    def own_block_bytes(self) -> int:
        """The bytes of a block that this model needs, on all ranks together."""
        return block_bytes(self.whole, self.options.block_size, self.kv_dtype, self.groups.size)

    @property
    def window(self) -> int:
        """The tokens that layers with blocks of their own see; 0: there are none."""
        return (self.model.sliding_window or 0) if self.groups.num_windows else 0

    @property
    def groups(self) -> LayerGroups:
        """The layers whose keys and values share a block: all, where no block would be freed behind a window. That is
        in contiguous memory, where texts are shorter than two windows, where vectors of adapters would not fit the
        smaller blocks, and in blocks that other models make large enough for all.
        """
        options, model = self.options, self.whole
        if options.kv_allocation is KVAllocation.CONTIGUOUS:
            return one_group(model.num_layers)
        room = self.least_block_bytes // block_bytes(model, options.block_size, self.kv_dtype, 1)
        groups = groups_of(model, options.max_model_len or model.max_position, room)
        least_bytes = options.block_size * groups.size * 2 * model.num_kv_heads * model.head_dim  # in any type
        widest = max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim) + ALIGNMENT_NUMBERS
        is_narrow = max(least_bytes, self.least_block_bytes) < widest * MAX_ITEM_BYTES  # a vector is not cut
        if options.max_adapter_rank and is_narrow:
            return one_group(model.num_layers)
        return groups


def size_engine(demand: ModelDemand, free_bytes: int, dedicated: bool = False) -> EngineConfig:
    """Return the engine's limits. Raises `ConfigError`, with the arithmetic, if options contradict model or memory.

    `dedicated`: the free bytes are those of a device that does nothing else, and may all hold keys and values.
    """
    options, model, groups = demand.options, demand.whole, demand.groups
    if options.max_model_len is not None and options.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {options.max_model_len} exceeds the model's {model.max_position} positions: "
            f"lower it to {model.max_position}"
        )
    per_block = max(demand.own_block_bytes, demand.least_block_bytes)
    wanted_len = options.max_model_len or model.max_position
    most_tokens = options.max_num_batched_tokens or _token_budget(options, wanted_len, dedicated)
    window = demand.window
    in_flight = options.steps_in_flight * most_tokens
    need = window_need(groups.num_windows, options.block_size, window + WINDOW_ALIGNMENT_TOKENS, in_flight)
    num_blocks = _kv_bytes(options, per_block, wanted_len, free_bytes, dedicated, need) // per_block
    if options.max_model_len is None:
        wanted_len = min(wanted_len, need.places(num_blocks) * options.block_size)
    _check_one_sequence_fits(options, model.max_position, wanted_len, num_blocks, per_block, need)
    budget = options.max_num_batched_tokens or _token_budget(options, wanted_len, dedicated)
    chunk = min(budget, wanted_len) if options.prefill_chunk is None else options.prefill_chunk
    chosen: dict[str, Any] = {name: getattr(options, name) for name in _CHOSEN}
    derived: dict[str, Any] = {
        "num_blocks": num_blocks,
        "max_model_len": wanted_len,
        "max_num_batched_tokens": budget,
        "prefill_chunk": None if chunk == "off" else chunk,
        "num_host_blocks": _host_blocks(options, per_block),
        "window_groups": groups.num_windows,
        "window_tokens": window,
    }
    return EngineConfig(**(chosen | derived))


_CHOSEN = {field.name for field in fields(EngineOptions)} & {field.name for field in fields(EngineConfig)}
"""The limits that an operator may choose; `size_engine` derives the limits that are not chosen."""


def _kv_bytes(
    options: EngineOptions, per_block: int, max_model_len: int, free_bytes: int, dedicated: bool, need: WindowNeed
) -> int:
    """Return the bytes of the KV pool: by default no more than `max_num_seqs` sequences of full length can use."""
    if options.kv_memory_bytes is not None:
        if options.kv_memory_bytes > free_bytes:
            asked = show_bytes(options.kv_memory_bytes)
            raise ConfigError(f"kv_memory_bytes asks for {asked}, and {show_bytes(free_bytes)} are free")
        return options.kv_memory_bytes
    usable = options.max_num_seqs * need.blocks(blocks_for(max_model_len, options.block_size)) * per_block
    if options.kv_memory_fraction is not None:
        return min(usable, int(free_bytes * options.kv_memory_fraction))
    return min(usable, free_bytes if dedicated else min(DEFAULT_KV_BYTES, free_bytes // 4))


def _host_blocks(options: EngineOptions, per_block: int) -> int:
    """Return the number of blocks in the host's memory to which others are swapped."""
    if options.swap_space_bytes > (free := free_memory()):
        asked = show_bytes(options.swap_space_bytes)
        raise ConfigError(f"swap_space_bytes asks for {asked} of the host's memory, and {show_bytes(free)} are free")
    if options.swap_space_bytes and not (options.prefix_cache and options.kv_allocation is KVAllocation.PAGED):
        raise ConfigError("swap_space_bytes needs the prefix cache and paged blocks: what is swapped is found by it")
    return options.swap_space_bytes // per_block


def _check_one_sequence_fits(
    options: EngineOptions, model_len: int, max_model_len: int, num_blocks: int, per_block: int, need: WindowNeed
) -> None:
    needed = need.blocks(max(1, blocks_for(max_model_len, options.block_size)))
    if num_blocks >= needed:
        return
    if num_blocks < need.blocks(1) and options.kv_memory_bytes is not None:
        length = options.max_model_len or model_len
        place, least = [need.blocks(places) * per_block for places in (1, blocks_for(length, options.block_size))]
        raise ConfigError(
            f"kv_memory_bytes is less than one block of {options.block_size} tokens ({show_bytes(place)}): "
            f"{show_bytes(least)} hold one sequence of {length:,} tokens, and each that runs beside it needs its own; "
            "sizes may be given with a unit, such as 2GiB"
        )
    raise ConfigError(
        f"KV memory holds {num_blocks} blocks of {per_block:,} B ({options.block_size} tokens each), and one sequence "
        f"of max_model_len {max_model_len} needs {needed} blocks = {needed * per_block:,} B: raise "
        f"kv_memory_bytes to at least that, or lower max_model_len to {need.places(num_blocks) * options.block_size}"
    )


def _token_budget(options: EngineOptions, max_model_len: int, dedicated: bool) -> int:
    whole_prompt = max_model_len if options.prefill_chunk == "off" else 1
    chunk = options.prefill_chunk if isinstance(options.prefill_chunk, int) else 1
    least = DEVICE_TOKEN_BUDGET if dedicated else CPU_TOKEN_BUDGET
    return max(least, options.max_num_seqs, whole_prompt, chunk)


CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that may be allocated now, within the control group's limit as well. The group's pages of files,
    such as of checkpoints that were read, can be evicted and count as free, as for the kubelet.
    """
    free = _meminfo("MemAvailable")
    limit, used = CONTROL_GROUP / "memory.max", CONTROL_GROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()) + _bytes_of_files())
    return max(free, 0)


def _bytes_of_files() -> int:
    stat = CONTROL_GROUP / "memory.stat"
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file"))


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"/proc/meminfo has no {key}: give kv_memory_bytes")
