"""Staging turns a batch's lists into numbers for the device: where every token goes, which rows are sampled.

A step allocates nothing. Host memory is a ring with a piece for each step that may be in flight: a piece is written
when its step is launched, and is free again when the step has been waited for or abandoned.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.config import Batching, EngineConfig
from backend.scheduler.batch import Batch
from backend.worker.graph_shapes import MAX_PROMPTS, StepShape

T = TypeVar("T")

_ALIGNMENT = 256  # bytes; kernels are compiled for addresses that are multiples of 16


@dataclass(frozen=True, slots=True)
class StepFields(Generic[T]):
    """The numbers of one step. Only the first entries of each array count; the names are those of `StepInputs`."""

    token_ids: T  # [tokens] int64; -1: a decode's, fed on the device
    positions: T  # [tokens] int64
    slot_mapping: T  # [tokens] int64; -1: padding, nothing is stored
    query_start: T  # [places + 1] int32
    context_lens: T  # [places] int32; 0: padding
    slots: T  # [places] int64
    window_slots: T  # [groups * `window_stride`] int64, `slot_mapping` of each layer group with a window
    adapters: T  # [tokens] int32, the row of each token's adapter; -1: none
    last_rows: T  # [sampled] int64, rows of hidden states after which a token is sampled; 0: padding
    sampled_slots: T  # [sampled] int64, the slots that sample; this field and the next ones have a row for each
    sampled_positions: T  # [sampled] int64, of the sampled tokens in their sequences
    seeds: T  # [sampled] int64
    temperature: T  # [sampled] fp32
    min_p: T  # [sampled] fp32
    top_k: T  # [sampled] int32
    top_p: T  # [sampled] fp32
    presence: T  # [sampled] fp32
    frequency: T  # [sampled] fp32
    repetition: T  # [sampled] fp32
    table_places: T  # [changes] int64, places in the flattened block tables that change
    table_blocks: T  # [changes] int32, the blocks in these places from now on


_TYPES = {
    torch.int32: ("query_start", "context_lens", "adapters", "top_k", "table_blocks"),
    torch.float32: ("temperature", "min_p", "top_p", "presence", "frequency", "repetition"),
}
_DTYPES = {name: dtype for dtype, names in _TYPES.items() for name in names}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of all fields in one piece of memory."""

    begins: tuple[int, ...]  # bytes, in the order of the fields
    counts: tuple[int, ...]
    num_bytes: int
    num_places: int  # of sequences in a step, padding included

    @classmethod
    def of(cls, config: EngineConfig) -> "Layout":
        seqs = config.max_num_seqs
        # half of the rows belong to no sequence
        most_rows = 2 * seqs if config.batching is Batching.STATIC_PADDED else seqs
        places, changes = most_rows + MAX_PROMPTS, config.max_table_entries
        by_name = dict.fromkeys(("token_ids", "positions", "slot_mapping", "adapters"), config.max_num_batched_tokens)
        by_name["window_slots"] = config.window_groups * window_stride(config.max_num_batched_tokens)
        by_name |= {"query_start": places + 1, "context_lens": places, "slots": places}
        by_name |= {"table_places": changes, "table_blocks": changes}
        counts = [by_name.get(field.name, config.max_sampled_tokens) for field in fields(StepFields)]
        sizes = [count * _dtype(field.name).itemsize for count, field in zip(counts, fields(StepFields), strict=True)]
        begins = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        return cls(tuple(begins[:-1]), tuple(counts), begins[-1], places)

    @property
    def num_head_bytes(self) -> int:
        """The bytes of all fields but the changes of block tables, of which only the present ones are copied."""
        return self.begins[-2]

    def views(self, memory: Tensor) -> StepFields[Tensor]:
        """Return the fields in `memory` [num_bytes] uint8."""
        names = (field.name for field in fields(StepFields))
        parts = zip(names, self.begins, self.counts, strict=True)
        return StepFields(**{name: _view(memory, begin, count, _dtype(name)) for name, begin, count in parts})


def window_stride(most_tokens: int) -> int:
    """Return the numbers of a group in `window_slots`: each begins at a multiple of 16 bytes, as kernels expect."""
    return -(-most_tokens // 2) * 2


def _dtype(name: str) -> torch.dtype:
    return _DTYPES.get(name, torch.int64)


def _view(memory: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


Ints = npt.NDArray[np.int64]
Numbers = StepFields[npt.NDArray[Any]]


class HostPiece:
    """The host memory of one step: its numbers, and the tokens of its output."""

    def __init__(self, layout: Layout, memory: Tensor, tokens: Tensor) -> None:
        self.memory = memory
        self.tensors = layout.views(memory)
        self.numbers: Numbers = StepFields(
            **{field.name: getattr(self.tensors, field.name).numpy() for field in fields(StepFields)}
        )
        self.tokens = tokens  # [sampled] int64


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A staged step, padded to its shape."""

    piece: HostPiece
    shape: StepShape
    num_rows: int  # that sample
    num_sampled: int  # tokens: of each row one, and one behind each of its drafted tokens
    num_changes: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """The sequences of a batch in its order; each array is [rows]."""

    slots: Ints
    lengths: Ints
    contexts: Ints  # tokens in the cache once this step's are stored
    ends: Ints  # of their tokens among the step's

    @classmethod
    def of(cls, batch: Batch) -> "_Rows":
        lengths = np.array(batch.lengths)
        return cls(np.array(batch.slots), lengths, np.array(batch.starts) + lengths, np.cumsum(lengths))


class Stager:
    """Writes batches into host memory, and keeps the host's copy of every slot's block table."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        memory: Callable[[int], Tensor],
        adapter_rows: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """`adapter_rows` has the row of each slot's adapter, -1 for none, as it is when a batch is staged."""
        self._adapter_rows = adapter_rows
        self._block_size = config.block_size
        self._groups, self._seqs = config.window_groups, config.max_num_seqs
        # the slots' tables, then those of each layer group with a window
        rows, width = (1 + self._groups) * self._seqs, config.blocks_for(config.max_model_len)
        self._tables = np.zeros((rows, width), np.int32)
        self._max_changes = layout.counts[-1]
        self._pieces = tuple(
            HostPiece(layout, memory(layout.num_bytes), memory(8 * config.max_sampled_tokens).view(torch.int64))
            for _ in range(config.steps_in_flight)
        )
        self._free = deque(self._pieces)

    def stage(self, batch: Batch, shape: StepShape) -> StagedStep:
        """Take a free piece and write the batch, padded to `shape`, which holds it."""
        assert self._free, "more steps are in flight than the configuration allows"
        piece = self._free.popleft()
        rows = _Rows.of(batch)
        num_changes = self._change_tables(batch, piece.numbers)
        self._place_tokens(piece.numbers, rows, batch)
        self._place_token_ids(piece.numbers, batch)
        self._pad_tokens(piece.numbers, int(rows.ends[-1]), shape)
        self._place_sequences(piece.numbers, batch.num_decodes, rows, shape)
        if self._adapter_rows is not None:
            end = int(rows.ends[-1])
            piece.numbers.adapters[:end] = np.repeat(self._adapter_rows[rows.slots], rows.lengths)
            piece.numbers.adapters[end : shape.num_tokens] = -1
        num_sampled = self._place_sampled(piece.numbers, batch, rows)
        return StagedStep(piece, shape, len(batch.sampled), num_sampled, num_changes)

    def release(self, staged: StagedStep) -> None:
        """Free the memory of a step that has been waited for and whose tokens are read."""
        self._free.append(staged.piece)

    @property
    def in_use(self) -> bool:
        """True if a piece was taken and is not free again, if only because staging was interrupted."""
        return len(self._free) < len(self._pieces)

    def release_all(self) -> None:
        """Free all memory: no step reads staged numbers any more, and no caller waits for a step."""
        self._free = deque(self._pieces)

    def _change_tables(self, batch: Batch, numbers: Numbers) -> int:
        """Apply new blocks; returns the number of changed places. A place named twice gets its last value both
        times.
        """
        width = self._tables.shape[1]
        changed: list[int] = []
        for slot, index, blocks in batch.new_blocks:
            self._tables[slot, index : index + len(blocks)] = blocks
            changed += range(slot * width + index, slot * width + index + len(blocks))
        for slot, first, blocks in batch.window_blocks:
            for group in range(self._groups):
                row, own = (1 + group) * self._seqs + slot, blocks[group :: self._groups]
                self._tables[row, first : first + len(own)] = own
                changed += range(row * width + first, row * width + first + len(own))
        places = np.array(changed, np.int64)
        if len(places) > self._max_changes:
            places = np.unique(places)
        numbers.table_places[: len(places)] = places
        numbers.table_blocks[: len(places)] = self._tables.reshape(-1)[places]
        return len(places)

    def _place_tokens(self, numbers: Numbers, rows: _Rows, batch: Batch) -> None:
        num_tokens = int(rows.ends[-1])
        slot_of = np.repeat(rows.slots, rows.lengths)  # [tokens]
        positions = np.arange(num_tokens) + np.repeat(rows.contexts - rows.ends, rows.lengths)
        blocks = self._tables[slot_of, positions // self._block_size].astype(np.int64)
        numbers.positions[:num_tokens] = positions
        numbers.slot_mapping[:num_tokens] = blocks * self._block_size + positions % self._block_size
        num_stored = num_tokens - sum([length for _, _, length in batch.padding]) if batch.stores else 0
        numbers.slot_mapping[num_stored:num_tokens] = -1
        for group in range(self._groups):
            rows_of = (1 + group) * self._seqs + slot_of
            blocks = self._tables[rows_of, positions // self._block_size].astype(np.int64)
            slots = self._window_slots(numbers)[group]
            slots[:num_tokens] = blocks * self._block_size + positions % self._block_size
            slots[num_stored:num_tokens] = -1

    def _window_slots(self, numbers: Numbers) -> npt.NDArray[np.int64]:
        return numbers.window_slots.reshape(self._groups, -1)

    @staticmethod
    def _place_token_ids(numbers: Numbers, batch: Batch) -> None:
        first = batch.num_decodes if batch.stores else 0
        numbers.token_ids[:first] = -1
        numbers.token_ids[first : first + len(batch.token_ids)] = batch.token_ids

    def _pad_tokens(self, numbers: Numbers, num_tokens: int, shape: StepShape) -> None:
        """Write padding tokens, which are stored nowhere."""
        padding = slice(num_tokens, shape.num_tokens)
        numbers.token_ids[padding] = 0
        numbers.positions[padding] = 0
        numbers.slot_mapping[padding] = -1
        if self._groups:
            self._window_slots(numbers)[:, padding] = -1

    @staticmethod
    def _place_sequences(numbers: Numbers, num_decodes: int, rows: _Rows, shape: StepShape) -> None:
        """Write decodes from place 0, prompts from `shape.num_decodes`; unused places are slot 0's, without tokens."""
        places, end = np.arange(len(rows.slots)), shape.num_seqs
        places[num_decodes:] += shape.num_decodes - num_decodes
        lengths = np.zeros(end, np.int32)
        lengths[places] = rows.lengths
        numbers.query_start[0] = 0
        np.cumsum(lengths, out=numbers.query_start[1 : end + 1])
        numbers.context_lens[:end] = 0
        numbers.context_lens[places] = rows.contexts
        numbers.slots[:end] = 0
        numbers.slots[places] = rows.slots

    @staticmethod
    def _place_sampled(numbers: Numbers, batch: Batch, rows: _Rows) -> int:
        """Write where tokens are sampled: each row's own, and behind all of those the tokens behind drafted ones."""
        sampled = np.array(batch.sampled, np.int64)
        last, slots, positions = rows.ends[sampled] - 1, rows.slots[sampled], rows.contexts[sampled]
        for index, slot in batch.forks:
            slots[index] = slot
        if batch.drafts:
            drafted = np.zeros(len(sampled), np.int64)
            for index, draft in batch.drafts:
                drafted[index] = len(draft)
            last, positions = last - drafted, positions - drafted
            again = np.repeat(np.arange(len(sampled)), drafted)  # the draft's order is that of its rows
            behind = np.concatenate([np.arange(1, 1 + len(draft)) for _, draft in batch.drafts])
            last, positions = np.append(last, last[again] + behind), np.append(positions, positions[again] + behind)
            slots = np.append(slots, slots[again])
        count = len(last)
        numbers.last_rows[:count] = last
        numbers.last_rows[count:] = 0
        numbers.sampled_slots[:count] = slots
        numbers.sampled_positions[:count] = positions
        return count
