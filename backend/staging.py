"""From a batch's lists to numbers on their way to the device: where every token goes, and which rows are sampled.

Nothing is allocated for a step. Host memory is a ring of as many pieces as steps may be in flight: a piece is written
when its step is launched and free again when the step has been waited for.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.batch import Batch
from backend.config import EngineConfig
from backend.step_fields import Layout, StepFields

Ints = npt.NDArray[np.int64]
Numbers = StepFields[npt.NDArray[Any]]


class HostPiece:
    """Host memory of one step: what it is told, and the tokens that it answers with."""

    def __init__(self, layout: Layout, memory: Tensor, tokens: Tensor) -> None:
        self.memory = memory
        self.tensors = layout.views(memory)
        self.numbers: Numbers = StepFields(
            **{field.name: getattr(self.tensors, field.name).numpy() for field in fields(StepFields)}
        )
        self.tokens = tokens  # [seqs] int64


@dataclass(frozen=True, slots=True)
class Staged:
    """A step as staged. `num_rows` sequences are computed, of which those after `num_seqs` are padding."""

    piece: HostPiece
    num_tokens: int
    num_seqs: int
    num_rows: int
    num_decodes: int
    num_sampled: int
    num_changes: int
    max_query_len: int
    max_context_len: int


class Stager:
    """Writes batches into host memory, and keeps the host's copy of every slot's block table."""

    def __init__(self, config: EngineConfig, layout: Layout, memory: Callable[[int], Tensor]) -> None:
        self._block_size = config.block_size
        self._tables = np.zeros((config.max_num_seqs, config.blocks_for(config.max_model_len)), np.int32)
        self._max_changes = layout.counts[-1]
        self._free = deque(
            HostPiece(layout, memory(layout.num_bytes), memory(8 * config.max_num_seqs).view(torch.int64))
            for _ in range(config.steps_in_flight)
        )

    def stage(self, batch: Batch, num_rows: int) -> Staged:
        """Take a free piece and write the batch, padded to `num_rows` sequences when it is all decodes."""
        assert self._free, "more steps are in flight than the configuration allows"
        piece = self._free.popleft()
        starts, lengths, slots = np.array(batch.starts), np.array(batch.lengths), np.array(batch.slots)
        num_changes = self._change_tables(batch, piece.numbers)
        self._place_tokens(piece.numbers, starts, lengths, slots)
        self._place_prompts(piece.numbers, batch)
        self._place_sampled(piece.numbers, batch, starts, lengths, slots)
        num_tokens = int(lengths.sum())
        self._pad(piece.numbers, len(slots), num_rows)
        return Staged(
            piece=piece,
            num_tokens=num_tokens + num_rows - len(slots),
            num_seqs=len(slots),
            num_rows=num_rows,
            num_decodes=num_rows if batch.num_decodes == len(slots) else batch.num_decodes,
            num_sampled=len(batch.sampled),
            num_changes=num_changes,
            max_query_len=int(lengths.max()),
            max_context_len=int((starts + lengths).max()),
        )

    def release(self, staged: Staged) -> None:
        """The step has been waited for and its tokens are read: its memory may be written again."""
        self._free.append(staged.piece)

    def _change_tables(self, batch: Batch, numbers: Numbers) -> int:
        """Apply new blocks; how many places changed. A place named twice gets what it holds at last both times."""
        width = self._tables.shape[1]
        changed: list[int] = []
        for slot, index, blocks in batch.new_blocks:
            self._tables[slot, index : index + len(blocks)] = blocks
            changed += range(slot * width + index, slot * width + index + len(blocks))
        places = np.array(changed, np.int64)
        if len(places) > self._max_changes:
            places = np.unique(places)
        numbers.table_places[: len(places)] = places
        numbers.table_blocks[: len(places)] = self._tables.reshape(-1)[places]
        return len(places)

    def _place_tokens(self, numbers: Numbers, starts: Ints, lengths: Ints, slots: Ints) -> None:
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        slot_of = np.repeat(slots, lengths)  # [tokens]
        positions = np.arange(num_tokens) + np.repeat(starts - (ends - lengths), lengths)
        blocks = self._tables[slot_of, positions // self._block_size].astype(np.int64)
        numbers.positions[:num_tokens] = positions
        numbers.slot_mapping[:num_tokens] = blocks * self._block_size + positions % self._block_size
        numbers.query_start[0] = 0
        numbers.query_start[1 : len(slots) + 1] = ends
        numbers.context_lens[: len(slots)] = starts + lengths
        numbers.slots[: len(slots)] = slots

    @staticmethod
    def _place_prompts(numbers: Numbers, batch: Batch) -> None:
        first = batch.num_decodes
        numbers.token_ids[first : first + len(batch.token_ids)] = batch.token_ids

    @staticmethod
    def _place_sampled(numbers: Numbers, batch: Batch, starts: Ints, lengths: Ints, slots: Ints) -> None:
        count = len(batch.sampled)
        rows = np.array(batch.sampled, np.int64)
        numbers.last_rows[:count] = numbers.query_start[rows + 1] - 1
        numbers.sampled_slots[:count] = slots[rows]
        numbers.sampled_positions[:count] = (starts + lengths)[rows]

    @staticmethod
    def _pad(numbers: Numbers, num_seqs: int, num_rows: int) -> None:
        """Rows of slot 0 without context, one token each, that store nothing."""
        padding = slice(num_seqs, num_rows)
        numbers.positions[padding] = 0
        numbers.slot_mapping[padding] = -1
        numbers.context_lens[padding] = 0
        numbers.slots[padding] = 0
        numbers.query_start[num_seqs + 1 : num_rows + 1] = np.arange(num_seqs + 1, num_rows + 1)
