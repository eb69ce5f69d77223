"""The low-rank products of adapters: y = A x, then out += B y, each row by the vectors of its own adapter.

A row of A and a column of B lie where the adapter's places say, so that they are gathered vector by vector, as the
pages of S-LoRA (Sheng et al., 2023). A step of decodes has a program for each row; in others a program takes a tile of
rows, and the adapters of its rows one after another: of a prompt's rows there is one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.ops import StepAdapters, StepInputs
from backend.kernels.triton_lang import await_inputs, dependent_launch, dot

TILE_ROWS = 16  # of a step with prompts
MIN_RANKS, MAX_RANKS = 16, 64  # of a program: of a tensor-core product, and without spills
TILE_NUMBERS = 2048  # of A or B in registers, of which each vector lies elsewhere
MAX_COLUMNS = 128  # outputs of a program


@triton.jit(do_not_specialize=["num_rows", "first"])
def _shrink(
    scaled,  # [num_rows, PARTS * RANK] fp32
    x,  # [num_rows, INPUTS]
    rows,  # [num_rows], the adapter of each row, or -1
    vectors,  # of all adapters, PLACES of each
    memory,
    num_rows,
    first,  # the product's first place
    PLACES: tl.constexpr,
    INPUTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    DECODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute A x of some rows for some ranks of one part."""
    RANK_BLOCKS: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // RANK_BLOCKS
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.program_id(1) % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    depth = tl.arange(0, BLOCK_K)
    await_inputs(PDL)
    left = tl.load(rows + tokens, mask=tokens < num_rows, other=-1)
    adapter = tl.max(left, 0)
    while adapter >= 0:
        mine = left == adapter
        places = vectors + adapter.to(tl.int64) * PLACES + first + part * RANK + ranks
        begins = tl.load(places, mask=ranks < RANK, other=-1)
        has = begins >= 0
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            inputs = start + depth
            real = inputs < INPUTS
            a = tl.load(memory + begins[None, :] + inputs[:, None], mask=has[None, :] & real[:, None], other=0.0)
            given = x + tokens[:, None].to(tl.int64) * INPUTS + inputs[None, :]
            numbers = tl.load(given, mask=mine[:, None] & real[None, :], other=0.0)
            if DECODES:
                acc += tl.sum(tl.trans(numbers).to(tl.float32) * a.to(tl.float32), 0)[None, :]
            else:
                acc = dot(numbers, a, acc)
        targets = scaled + tokens[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
        tl.store(targets, acc, mask=mine[:, None] & (ranks < RANK)[None, :])
        left = tl.where(mine, -1, left)
        adapter = tl.max(left, 0)


@triton.jit(do_not_specialize=["num_rows", "first"])
def _expand(
    out,  # [num_rows, OUT_0 + OUT_1 + OUT_2]
    scaled,
    rows,
    vectors,
    memory,
    num_rows,
    first,
    PLACES: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    DECODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add B y of some rows to some outputs of one part."""
    BLOCKS_0: tl.constexpr = (OUT_0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = (OUT_1 + BLOCK_N - 1) // BLOCK_N
    index = tl.program_id(1)
    part = (index >= BLOCKS_0).to(tl.int32) + (index >= BLOCKS_0 + BLOCKS_1).to(tl.int32)
    block = index - tl.where(part > 0, BLOCKS_0, 0) - tl.where(part > 1, BLOCKS_1, 0)
    outputs = tl.where(part == 0, OUT_0, tl.where(part == 1, OUT_1, OUT_2))
    before = tl.where(part > 0, OUT_0, 0) + tl.where(part > 1, OUT_1, 0)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    real = columns < outputs
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    await_inputs(PDL)
    left = tl.load(rows + tokens, mask=tokens < num_rows, other=-1)
    adapter = tl.max(left, 0)
    while adapter >= 0:
        mine = left == adapter
        places = vectors + adapter.to(tl.int64) * PLACES + first + (PARTS + part) * RANK + ranks
        begins = tl.load(places, mask=ranks < RANK, other=-1)
        has = begins >= 0
        b = tl.load(memory + begins[:, None] + columns[None, :], mask=has[:, None] & real[None, :], other=0.0)
        given = scaled + tokens[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
        numbers = tl.load(given, mask=mine[:, None] & has[None, :], other=0.0)
        if DECODES:
            added = tl.sum(tl.trans(numbers) * b.to(tl.float32), 0)[None, :]
        else:
            added = dot(numbers, b.to(tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        targets = out + tokens[:, None].to(tl.int64) * (OUT_0 + OUT_1 + OUT_2) + before + columns[None, :]
        held = mine[:, None] & real[None, :]
        total = tl.load(targets, mask=held, other=0.0).to(tl.float32) + added
        tl.store(targets, total.to(out.dtype.element_ty), mask=held)
        left = tl.where(mine, -1, left)
        adapter = tl.max(left, 0)


def launch_adapt(out: Tensor, x: Tensor, step: StepInputs, layer: int, product: int) -> None:
    """Launch the kernels of `reference.adapt`. The launches depend on the step's host numbers alone."""
    adapters = step.adapters
    assert adapters is not None
    assert out.is_contiguous()
    assert x.is_contiguous()
    num_rows, parts = x.shape[0], adapters.parts[product]
    first = layer * adapters.vectors.shape[2] + adapters.first(product)
    decodes = step.max_query_len == 1
    rows = 1 if decodes else TILE_ROWS
    tiles = triton.cdiv(num_rows, rows)
    scaled = torch.empty((num_rows, len(parts) * adapters.rank), dtype=torch.float32, device=x.device)
    given = {
        "PLACES": adapters.vectors.shape[1] * adapters.vectors.shape[2],
        "RANK": adapters.rank,
        "PARTS": len(parts),
        "DECODES": decodes,  # a row for each program
        "BLOCK_M": rows,
        **dependent_launch(x.device),
    }
    all_ranks = max(MIN_RANKS, triton.next_power_of_2(adapters.rank))
    ranks, columns = min(MAX_RANKS, all_ranks), max(MIN_RANKS, min(MAX_COLUMNS, TILE_NUMBERS // all_ranks))
    of = _of(adapters)
    _shrink[tiles, len(parts) * triton.cdiv(adapters.rank, ranks)](
        scaled,
        x,
        *of,
        num_rows,
        first,
        INPUTS=x.shape[1],
        BLOCK_R=ranks,
        BLOCK_K=TILE_NUMBERS // ranks // (2 if decodes else 1),
        num_warps=4,
        num_stages=2,
        **given,
    )
    outputs = dict(zip(("OUT_0", "OUT_1", "OUT_2"), (*parts, 0, 0), strict=False))
    _expand[tiles, sum(triton.cdiv(one, columns) for one in parts)](
        out, scaled, *of, num_rows, first, **outputs, BLOCK_R=all_ranks, BLOCK_N=columns, num_warps=4, **given
    )


def _of(adapters: StepAdapters) -> tuple[Tensor, Tensor, Tensor]:
    return adapters.rows, adapters.vectors, adapters.memory
