"""The numbers of one step, laid out in one piece of memory, so that one copy takes them to the device."""

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.graph_shapes import MAX_PROMPTS

T = TypeVar("T")

_ALIGNMENT = 256  # bytes; kernels are compiled for addresses that are multiples of 16


@dataclass(frozen=True, slots=True)
class StepFields(Generic[T]):
    """One step's numbers. Of each array the first so many count; the names are those of `StepInputs`."""

    token_ids: T  # [tokens] int64; -1: a decode's, fed on the device
    positions: T  # [tokens] int64
    slot_mapping: T  # [tokens] int64; -1: padding, nothing is stored
    query_start: T  # [places + 1] int32
    context_lens: T  # [places] int32; 0: padding
    slots: T  # [places] int64
    last_rows: T  # [seqs] int64, rows of hidden states after which a token is sampled; 0: padding
    sampled_slots: T  # [seqs] int64, the slots that sample; this and what follows a row for each
    sampled_positions: T  # [seqs] int64, of the sampled tokens in their sequences
    seeds: T  # [seqs] int64
    temperature: T  # [seqs] fp32
    min_p: T  # [seqs] fp32
    top_k: T  # [seqs] int32
    top_p: T  # [seqs] fp32
    presence: T  # [seqs] fp32
    frequency: T  # [seqs] fp32
    repetition: T  # [seqs] fp32
    table_places: T  # [changes] int64, places in the flattened block tables that change
    table_blocks: T  # [changes] int32, and the blocks that they hold from now on


_TYPES = {
    torch.int32: ("query_start", "context_lens", "top_k", "table_blocks"),
    torch.float32: ("temperature", "min_p", "top_p", "presence", "frequency", "repetition"),
}
_DTYPES = {name: dtype for dtype, names in _TYPES.items() for name in names}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each field lies in one piece of memory."""

    begins: tuple[int, ...]  # bytes, in the order of the fields
    counts: tuple[int, ...]
    num_bytes: int
    num_places: int  # of sequences in a step, those included that pad it

    @classmethod
    def of(cls, config: EngineConfig) -> "Layout":
        seqs, width = config.max_num_seqs, config.blocks_for(config.max_model_len)
        places, changes = seqs + MAX_PROMPTS, min(seqs * width, 2 * config.num_blocks)
        by_name = dict.fromkeys(("token_ids", "positions", "slot_mapping"), config.max_num_batched_tokens)
        by_name |= {"query_start": places + 1, "context_lens": places, "slots": places}
        by_name |= {"table_places": changes, "table_blocks": changes}
        counts = [by_name.get(field.name, seqs) for field in fields(StepFields)]
        sizes = [count * _dtype(field.name).itemsize for count, field in zip(counts, fields(StepFields), strict=True)]
        begins = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        return cls(tuple(begins[:-1]), tuple(counts), begins[-1], places)

    @property
    def num_head_bytes(self) -> int:
        """Bytes of all fields but the changes of block tables, which are copied as far as there are any."""
        return self.begins[-2]

    def views(self, memory: Tensor) -> StepFields[Tensor]:
        """The fields in `memory` [num_bytes] uint8."""
        names = (field.name for field in fields(StepFields))
        parts = zip(names, self.begins, self.counts, strict=True)
        return StepFields(**{name: _view(memory, begin, count, _dtype(name)) for name, begin, count in parts})


def _dtype(name: str) -> torch.dtype:
    return _DTYPES.get(name, torch.int64)


def _view(memory: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    return memory[begin : begin + count * dtype.itemsize].view(dtype)
