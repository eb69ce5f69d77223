"""Ragged steps over a paged cache whose blocks are dealt in shuffled order and whose unused slots hold NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.kernels.ops import StepInputs


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class Ragged:
    """A step, and the cache it runs over as two strided views of one pool."""

    step: StepInputs
    pool: Tensor  # [num_blocks, 3 layers, K/V, Hk, block_size, D]
    heads: Heads

    @property
    def k_cache(self) -> Tensor:
        return self.pool[:, 1, 0]

    @property
    def v_cache(self) -> Tensor:
        return self.pool[:, 1, 1]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(self.pool.dtype)


def ragged(
    spans: Sequence[tuple[int, int]],  # new tokens and context of each sequence
    heads: Heads,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    stored: bool = True,  # whether the step's own keys and values are in the cache already
) -> Ragged:
    generator = torch.Generator().manual_seed(block_size)
    needed = [-(-context // block_size) for _, context in spans]
    shuffled = torch.randperm(sum(needed) + 3, generator=generator).int()
    tables = torch.zeros((len(spans), max(needed) + 1), dtype=torch.int32)
    pool = torch.full((len(shuffled), 3, 2, heads.keys, block_size, heads.dim), torch.nan, dtype=dtype)
    dealt, positions, slots = 0, [], []
    for row, ((count, context), blocks) in enumerate(zip(spans, needed, strict=True)):
        tables[row, :blocks] = shuffled[dealt : dealt + blocks]
        dealt += blocks
        everywhere = torch.arange(context)
        block, offset = tables[row, everywhere // block_size].long(), everywhere % block_size
        filled = context if stored else context - count
        values = torch.randn((filled, 3, 2, heads.keys, heads.dim), generator=generator).to(dtype)
        pool[block[:filled], :, :, :, offset[:filled]] = values
        positions.append(everywhere[context - count :])
        slots.append((block * block_size + offset)[context - count :])
    counts = torch.tensor([0] + [count for count, _ in spans])
    step = StepInputs(
        token_ids=torch.zeros(int(counts.sum()), dtype=torch.int64),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_start=counts.cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_tables=tables,
        num_seqs=len(spans),
        max_query_len=max(count for count, _ in spans),
        max_context_len=max(context for _, context in spans),
    )
    return Ragged(step, pool, heads)
