"""The configuration of an engine: classes that check the limits against each other when they are made."""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Literal

from backend.errors import ConfigError
from backend.paged_kv.block_pool import blocks_for

MAX_TABLE_ENTRIES = 2**20  # unless the pool has half as many blocks
WINDOW_ALIGNMENT_TOKENS = 64  # kernels read keys from a multiple of that on, though they give hidden ones no weight


KVCacheDtype = Literal["auto", "fp8"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8", "stored"]
Speculate = Literal["off", "lookup"]
DRAFTED_TOKENS_PER_STEP = 64  # the most: logits of each of them have room beside those of all sequences


class Batching(StrEnum):
    """A batching rule decides when waiting sequences may join, and which rows a step computes: see
    `scheduler.batching`, and `labs.batchings` for all but the first.
    """

    CONTINUOUS = "continuous"
    STATIC = "static"
    STATIC_PADDED = "static_padded"
    SLAI = "slai"
    WINDOW = "window"
    PREFILL_FIRST = "prefill_first"
    WAIT = "wait"
    NESTED_WAIT = "nested_wait"
    MULTILEVEL_FEEDBACK = "multilevel_feedback"

    @property
    def is_static(self) -> bool:
        return self in (Batching.STATIC, Batching.STATIC_PADDED)


class KVAllocation(StrEnum):
    """KV allocation decides how blocks are allocated. Contiguous, the baseline: prompt + max_tokens in one run."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An operator's options, under the names of the settings, with their defaults; None leaves the choice to
    `size_engine`.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    prefill_chunk: int | Literal["off"] | None = None
    block_size: int = 16
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float | None = None
    batching: Batching = Batching.CONTINUOUS
    kv_allocation: KVAllocation = KVAllocation.PAGED
    steps_in_flight: int = 2
    kv_cache_dtype: KVCacheDtype = "auto"
    quantization: Quantization = "auto"
    prefix_cache: bool = True
    swap_space_bytes: int = 0  # of the host's memory
    max_adapter_rank: int = 0  # 0: no adapters
    speculate: Speculate = "off"


@dataclass(frozen=True, slots=True)
class WindowNeed:
    """The blocks that a sequence holds in groups of layers with a window, beside those of its whole text."""

    groups: int  # 0: none
    most: int  # of a group, with the tokens of all steps in flight
    decoding: int  # of a group, for one token a step

    def blocks(self, places: int) -> int:
        """Return the most blocks that a sequence holds, whose block table has `places`."""
        return places + self.groups * min(places, self.most)

    def tokens(self, text: float, block_size: int) -> float:
        """Return the tokens of memory that a decode of `text` tokens holds, each of a group counted as one."""
        return text + self.groups * min(text, self.decoding * block_size)

    def places(self, blocks: int) -> int:
        """Return the most places of a block table whose sequence holds at most `blocks`."""
        return max(blocks // (1 + self.groups), blocks - self.groups * self.most)


NO_WINDOW = WindowNeed(0, 0, 0)


@lru_cache
def window_need(groups: int, block_size: int, seen: int, in_flight: int) -> WindowNeed:
    """Return the need of groups of layers for a window of `seen` tokens, while steps in flight have at most `in_flight`
    more.
    """
    return WindowNeed(groups, 2 + blocks_for(seen + in_flight, block_size), 1 + blocks_for(seen, block_size))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The limits of one engine. Tokens and sequences are counts; a block is `block_size` tokens of KV over all layers.

    Raises `ConfigError` when the limits contradict each other.
    """

    num_blocks: int
    max_model_len: int  # prompt + output of one sequence
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_chunk: int | None = 256  # the most tokens of one prompt in a step; None: whole prompts only
    batching: Batching = Batching.CONTINUOUS
    max_batch_delay: float | None = None  # seconds that a window, or WAIT, waits for others; None: the rule's own
    preferred_batch_sizes: tuple[int, ...] = ()  # of a window's batches; none: max_num_seqs
    kv_allocation: KVAllocation = KVAllocation.PAGED
    steps_in_flight: int = 2
    max_preemptions: int = 8  # of one sequence
    num_host_blocks: int = 0  # in the host's memory, to which blocks are swapped
    block_copy_seconds: float = 0.0  # of one block to the host, or back
    copies_run_ahead: bool = False  # copies run beside the steps in flight, not as a part of their own step
    prefix_cache: bool = True  # sequences that begin with the same tokens share blocks; not with contiguous blocks
    max_adapter_rank: int = 0  # 0: no adapters
    # of each model three: seconds that a block of an adapter adds to a step for each decode and each token of a prompt,
    # and to be brought
    adapter_block_seconds: tuple[float, ...] = (0.0, 0.0, 0.0)
    awake_bytes: int = 0  # of the weights in memory at a time; 0: all models' are
    weight_bytes: tuple[int, ...] = ()  # of each model, if some sleep
    wake_seconds: tuple[float, ...] = ()  # until the weights of each are in memory again
    expert_reads: tuple[tuple[float, float], ...] = ()  # of each model, as `Footprint.expert_reads`; none: no experts
    window_groups: int = 0  # groups of layers with a window, each with blocks of its own; 0: blocks are of all layers
    window_tokens: int = 0  # that such a layer sees
    window_alignment: int = WINDOW_ALIGNMENT_TOKENS
    further_windows: tuple[tuple[int, int], ...] = ()  # of each further model the two before; none: as the first's
    speculate: Speculate = "off"

    def __post_init__(self) -> None:
        for field in ("num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, field) >= 1, f"{field} must be at least 1, got {getattr(self, field)}")
        _require(self.steps_in_flight in (1, 2), f"steps_in_flight must be 1 or 2, got {self.steps_in_flight}")
        _require(
            self.max_num_seqs <= self.max_num_batched_tokens,
            f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens {self.max_num_batched_tokens}: "
            "every running sequence takes one token of each step; raise the budget or lower max_num_seqs",
        )
        _require(
            not self.max_adapter_rank or self.kv_allocation is KVAllocation.PAGED,
            "adapters lie in single blocks of KV memory: leave kv_allocation paged, or serve none",
        )
        _require(
            self.speculate == "off" or self.batching is Batching.CONTINUOUS,
            f"speculate {self.speculate} needs batching continuous: no other rule plans rows with drafts",
        )
        most = max(self.weight_bytes, default=0)
        _require(
            not self.awake_bytes or most <= self.awake_bytes,
            f"awake_bytes {self.awake_bytes:,} holds no model of {most:,} B of weights: raise it to at least that",
        )
        self._check_chunk()
        self._check_batches()
        capacity = self.num_blocks * self.block_size
        _require(
            self.max_model_len <= capacity,
            f"max_model_len {self.max_model_len} does not fit the KV memory: {self.num_blocks} blocks x "
            f"{self.block_size} tokens = {capacity} tokens; give more KV memory or lower max_model_len",
        )
        needed = self.kv_blocks(self.max_model_len)
        _require(
            needed <= self.num_blocks or bool(self.further_windows),  # the length of another model, checked by itself
            f"max_model_len {self.max_model_len} needs {needed} blocks with those of its window, and the KV memory has "
            f"{self.num_blocks}: give more KV memory or lower max_model_len",
        )

    def adapter_seconds_of(self, model: int) -> tuple[float, float, float]:
        decode, prompt, bring = self.adapter_block_seconds[3 * model : 3 * model + 3] or (0.0, 0.0, 0.0)
        return decode, prompt, bring

    def expert_reads_of(self, model: int) -> tuple[float, float]:
        return self.expert_reads[model] if self.expert_reads else (0.0, 0.0)

    def _check_chunk(self) -> None:
        if self.prefill_chunk is None:
            _require(
                self.max_num_batched_tokens >= self.max_model_len,
                f"prefill_chunk off computes a prompt in one step, so max_num_batched_tokens "
                f"{self.max_num_batched_tokens} must be at least max_model_len {self.max_model_len}",
            )
            return
        _require(
            1 <= self.prefill_chunk <= self.max_num_batched_tokens,
            f"prefill_chunk {self.prefill_chunk} must be between 1 and max_num_batched_tokens "
            f"{self.max_num_batched_tokens}, or off",
        )

    def _check_batches(self) -> None:
        delay, sizes = self.max_batch_delay, self.preferred_batch_sizes
        _require(delay is None or delay >= 0, f"max_batch_delay must be at least 0 seconds, got {delay}")
        _require(
            all(1 <= size <= self.max_num_seqs for size in sizes),
            f"preferred_batch_sizes {', '.join(map(str, sizes))} must be from 1 to max_num_seqs {self.max_num_seqs}",
        )

    @property
    def shares_blocks(self) -> bool:
        """True if sequences may share blocks: a contiguous run is one sequence's own."""
        return self.prefix_cache and self.kv_allocation is KVAllocation.PAGED

    @property
    def max_sampled_tokens(self) -> int:
        """The most tokens that a step samples: one for each sequence, and one for each drafted token."""
        return self.max_num_seqs + (0 if self.speculate == "off" else DRAFTED_TOKENS_PER_STEP)

    @property
    def max_table_entries(self) -> int:
        """The blocks that the tables of all running sequences may name together, shared ones counted for each table.

        A step may have to tell the device all of them, so its staging memory grows with this number: every sequence's
        need, up to the blocks of sixteen million tokens.
        """
        needed = self.max_num_seqs * self.longest_blocks
        return min(needed, max(2 * self.num_blocks, MAX_TABLE_ENTRIES))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens of layers without a window."""
        return blocks_for(num_tokens, self.block_size)

    def windows_of(self, model: int) -> tuple[int, int]:
        """Return a model's groups of layers with a window, and the tokens that these see."""
        if model and self.further_windows:
            return self.further_windows[model - 1]
        return self.window_groups, self.window_tokens

    @property
    def most_window_groups(self) -> int:
        """The groups of the model with the most."""
        return max(self.window_groups, *[groups for groups, _ in self.further_windows], 0)

    def kv_blocks(self, num_tokens: int, model: int = 0) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at a time, those of its window included."""
        blocks = self.blocks_for(num_tokens)
        return self.need_of(model).blocks(blocks) if self.windows_of(model)[0] else blocks

    @property
    def longest_blocks(self) -> int:
        """The most blocks that a sequence of any model holds at a time."""
        return max([self.kv_blocks(self.max_model_len, model) for model in range(1 + len(self.further_windows))])

    @property
    def window_need(self) -> WindowNeed:
        """The need of the first model."""
        return self.need_of(0)

    def need_of(self, model: int) -> WindowNeed:
        groups, tokens = self.windows_of(model)
        in_flight = self.steps_in_flight * self.max_num_batched_tokens
        return window_need(groups, self.block_size, tokens + self.window_alignment, in_flight)

    @property
    def kv_tokens(self) -> int:
        """The tokens of decodes of `max_model_len` that the memory holds at a time."""
        whole = self.num_blocks * self.block_size
        if not self.window_groups:
            return whole
        return int(whole * self.max_model_len / self.window_need.tokens(self.max_model_len, self.block_size))

    def short_tokens(self, blocks: int) -> int:
        """Return the tokens of texts no longer than a window that blocks hold, of the model that needs most: of longer
        ones, and of other models, they hold more.
        """
        return blocks * self.block_size // (1 + self.most_window_groups)

    def first_seen(self, num_tokens: int, model: int = 0) -> int:
        """Return the first place in a block table that tokens behind `num_tokens` see in layers with a window."""
        first = max(0, num_tokens - self.windows_of(model)[1] + 1)
        return first // self.window_alignment * self.window_alignment // self.block_size


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
