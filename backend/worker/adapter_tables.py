"""The device's adapters: where in KV memory the vectors of each lie, and which of them each slot's sequence has."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.kernels.ops import StepAdapters
from backend.model.adapter_checkpoint import AdapterWeights, num_places
from backend.model.model_config import ModelConfig
from backend.paged_kv.kv_cache import KVCache
from backend.scheduler.batch import Batch, NewSequence

_Key = tuple[int, tuple[int, ...]]
"""The number of an adapter's loading, and the blocks in which it lies."""


class AdapterTables:
    """Keeps the weights of adapters on the host, and a row of places on the device for each adapter of a slot.

    A row is written anew only when no slot has its adapter any more: a slot is given to another sequence when the last
    step that names it has completed, so that no step in flight reads the row. There are as many rows as slots.

    The launching thread owns it; `add` and `remove` may be called by another. Several models' tables have one set of
    weights: what a step brings may be of another model, whose step was lost.
    """

    def __init__(
        self,
        model: ModelConfig,
        kv: KVCache,
        config: EngineConfig,
        dtype: torch.dtype,
        beside: "AdapterTables | None" = None,
    ) -> None:
        """`beside`: the tables of another model in the same memory."""
        self.dtype, self.device = dtype, kv.memory.device
        self.block_numbers = kv.memory.shape[1] // dtype.itemsize
        self.rows = np.full(config.max_num_seqs, -1, np.int32)  # by slot
        self._blocks, self._memory = kv.memory, kv.memory.view(-1).view(dtype)
        self._rank = config.max_adapter_rank
        query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden, between = model.hidden_size, model.intermediate_size
        self._parts = ((query, key, key), (hidden,), (between, between), (hidden,))
        shape = (config.max_num_seqs, model.num_layers, num_places(self._rank))
        self._vectors = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        self._weights: dict[int, AdapterWeights] = {} if beside is None else beside._weights
        self._row_of: dict[_Key, int] = {}
        self._keys: list[_Key | None] = [None] * config.max_num_seqs
        self._users = [0] * config.max_num_seqs  # slots with the adapter of each row
        self._free = list(range(config.max_num_seqs))
        self._unwritten: dict[int, Tensor] = {}  # rows that no step has written yet

    def add(self, number: int, weights: AdapterWeights) -> None:
        """Keep an adapter's weights for the steps to come."""
        self._weights[number] = weights

    def remove(self, number: int) -> None:
        """Forget an adapter that no sequence has any more."""
        self._weights.pop(number, None)

    def admit(self, admitted: NewSequence) -> None:
        """Take note of the adapter of a slot's new sequence."""
        slot = admitted.slot
        if (before := int(self.rows[slot])) >= 0:
            self._users[before] -= 1
            if not self._users[before]:
                del self._row_of[self._keys[before]]  # type: ignore[arg-type]
                self._free.append(before)
        self.rows[slot] = -1
        if admitted.adapter is None or (weights := self._weights.get(admitted.adapter[0])) is None:
            return
        key = admitted.adapter[0], tuple(admitted.adapter[1])
        row = self._row_of.get(key)
        if row is None:
            row = self._row_of[key] = self._free.pop()
            self._keys[row] = key
            self._unwritten[row] = self._placed(weights, admitted.adapter[1])
        self._users[row] += 1
        self.rows[slot] = row

    def has_some(self, batch: Batch) -> bool:
        """Return True if a row of the batch has an adapter."""
        return bool((self.rows[batch.slots] >= 0).any())

    def copies(self, batch: Batch) -> partial[None]:
        """Return the work that brings the step's adapters to the device, before it computes anything."""
        return partial(self._copy, list(self._blocks_of(batch)))

    def of(self, rows: Tensor) -> StepAdapters:
        """Return the adapters of a step, given each token's row [T] on the device."""
        return StepAdapters(rows, self._vectors, self._memory, self._rank, self._parts)

    def _blocks_of(self, batch: Batch) -> Iterator[tuple[int, Tensor]]:
        for number, index, block in batch.adapter_blocks:
            if (weights := self._weights.get(number)) is not None:  # else no sequence has it any more
                yield block, weights.blocks[index]

    def _copy(self, blocks: list[tuple[int, Tensor]]) -> None:
        for block, weights in blocks:
            self._blocks[block].copy_(weights.view(torch.uint8), non_blocking=True)
        for row, places in self._unwritten.items():
            self._vectors[row].copy_(places, non_blocking=True)
        self._unwritten.clear()

    def _placed(self, weights: AdapterWeights, blocks: list[int]) -> Tensor:
        """Return where each vector lies when the adapter is in these blocks."""
        index, offset = weights.vectors // self.block_numbers, weights.vectors % self.block_numbers
        placed = torch.tensor(blocks)[index.clamp_min(0)] * self.block_numbers + offset
        return placed.where(weights.vectors >= 0, -1)
