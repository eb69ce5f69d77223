"""Attention of one new token a sequence, split along its paged context (flash decoding).

A program takes one chunk of one sequence's context for one KV head, whose query heads are the rows of its products.
Chunks are sized on the device from the context lengths, so that there are about `CHUNKS_PER_MULTIPROCESSOR` for each
multiprocessor in any mix of lengths: the launch depends on the number of sequences alone, and a CUDA graph can hold it.
A second kernel joins the chunks of the sequences that have several (Dao et al., 2023).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.triton_lang import (
    LOG2E,
    NO_WINDOW,
    SCAN,
    advance,
    await_inputs,
    begun,
    capability,
    dependent_launch,
    dot,
    from_cache,
    kernel_view,
    multiprocessors,
)

CHUNKS_PER_MULTIPROCESSOR = 8
MIN_ROWS = 16  # of a tensor-core product
CHUNKS_PER_JOIN_STEP = 16  # chunks that one step of the join loads


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """The keys that one step of the loop over the context takes, and the warps and stages that run it."""

    keys: int
    warps: int
    stages: int


def decode_tile(q: Tensor, cache: Tensor) -> DecodeTile:
    """Return a tile of 16 KiB in 16-bit types. Block ids come first, so five stages are two tiles ahead.

    From sm_90 on four stages are enough: on an H200 they took 4 to 14 % less time at every batch, because more
    programs fit a multiprocessor. Keys and values that are converted from 8 bits need registers for both; heads of
    256 then need twice the warps, or they spill.
    """
    head_dim, converted = q.shape[2], cache.itemsize == 1
    if q.dtype == torch.float32:
        return DecodeTile(keys=32, warps=4, stages=2) if head_dim <= 128 else DecodeTile(keys=16, warps=8, stages=2)
    if head_dim <= 128:
        return DecodeTile(keys=64, warps=4, stages=4 if capability(q.device) >= (9, 0) and not converted else 5)
    return DecodeTile(keys=32, warps=8 if converted else 4, stages=5)


@triton.jit
def _visible(context_lens, sequences, num_seqs, window):
    """Return the number of keys that the new token of each of `sequences` sees; 0 beyond the batch."""
    return tl.minimum(tl.load(context_lens + sequences, mask=sequences < num_seqs, other=0), window)


@triton.jit
def _chunk_size(context_lens, num_seqs, window, max_chunks, BLOCK_N: tl.constexpr):
    """Return the keys of a chunk, a multiple of BLOCK_N; the batch has at most `max_chunks` + `num_seqs` chunks."""
    total = tl.zeros([], tl.int64)
    for base in range(0, num_seqs, SCAN):
        total += tl.sum(_visible(context_lens, base + tl.arange(0, SCAN), num_seqs, window).to(tl.int64), 0)
    tiles = tl.cdiv(tl.cdiv(total, max_chunks), BLOCK_N)
    return tl.maximum(tiles, 1).to(tl.int32) * BLOCK_N


@triton.jit(do_not_specialize=["num_seqs", "max_chunks", "window", "table_stride"])
def _decode(
    out,  # [S, Hq, D]
    partial,  # [chunks, Hq, D] fp32
    partial_lse,  # [chunks, Hq] fp32, base 2
    q,  # [S, Hq, D]
    sinks,  # [Hq] fp32
    k_cache,
    v_cache,
    context_lens,
    block_tables,
    num_seqs,
    max_chunks,
    window,
    table_stride,
    block_stride,
    head_stride,
    qk_scale,  # includes log2(e) and the scale of 8-bit keys
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    chunk = _chunk_size(context_lens, num_seqs, window, max_chunks, BLOCK_N)
    sequence, first, before = 0, 0, 0
    for base in range(0, num_seqs, SCAN):
        sequences = base + tl.arange(0, SCAN)
        counts = tl.cdiv(_visible(context_lens, sequences, num_seqs, window), chunk)
        sequence, first, before = advance(item, sequences, counts, num_seqs, sequence, first, before)
    await_inputs(PDL)
    if sequence >= num_seqs:
        return

    context = tl.load(context_lens + sequence)
    visible = tl.minimum(context, window)
    num_chunks = tl.cdiv(visible, chunk)
    length = tl.cdiv(tl.cdiv(visible, num_chunks), BLOCK_N) * BLOCK_N
    begin = context - visible + (item - first) * length
    end = tl.minimum(begin + length, context)

    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    rows = tl.cast(sequence, tl.int64) * tl.num_programs(0) * GROUP + head * GROUP + group
    held = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + rows[:, None] * HEAD_DIM + dims[None, :], mask=held, other=0.0)
    table = block_tables + tl.cast(sequence, tl.int64) * table_stride
    k_head = k_cache + head.to(tl.int64) * head_stride
    v_head = v_cache + head.to(tl.int64) * head_stride

    largest, total = begun(sinks, head * GROUP + tl.minimum(group, GROUP - 1), item == first, SINKS)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        seen = keys < end
        block = tl.load(table + keys // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        places = block * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
        loaded = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = from_cache(tl.load(k_head + places[:, None] + dims[None, :], mask=loaded, other=0.0), query.dtype)
        v = from_cache(tl.load(v_head + places[:, None] + dims[None, :], mask=loaded, other=0.0), query.dtype)
        scores = dot(query, tl.trans(k), tl.zeros([BLOCK_G, BLOCK_N], tl.float32)) * qk_scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(query.dtype), v, acc * shrink[:, None])
        largest = larger

    acc = acc * (v_scale / total)[:, None]
    if num_chunks == 1:
        tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=held)
    else:
        rows = tl.cast(item, tl.int64) * tl.num_programs(0) * GROUP + head * GROUP + group
        tl.store(partial + rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=held)
        tl.store(partial_lse + rows, largest + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_seqs", "max_chunks", "window"])
def _join(
    out,
    partial,
    partial_lse,
    context_lens,
    num_seqs,
    max_chunks,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS_PER_JOIN_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the weighted mean of a sequence's chunks for one query head; zeros for a row without context."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    chunk = _chunk_size(context_lens, num_seqs, window, max_chunks, BLOCK_N)
    num_chunks = tl.cdiv(tl.minimum(tl.load(context_lens + sequence), window), chunk)
    await_inputs(PDL)
    if num_chunks == 1:
        return
    first = 0
    for base in range(0, sequence, SCAN):
        visible = _visible(context_lens, base + tl.arange(0, SCAN), sequence, window)
        first += tl.sum(tl.cdiv(visible, chunk), 0)

    dims = tl.arange(0, BLOCK_D)
    held = dims < HEAD_DIM
    largest = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for base in range(0, num_chunks, CHUNKS_PER_JOIN_STEP):
        chunks = base + tl.arange(0, CHUNKS_PER_JOIN_STEP)
        real = chunks < num_chunks
        rows = (first + chunks).to(tl.int64) * num_heads + head
        lse = tl.load(partial_lse + rows, mask=real, other=-float("inf"))
        values = tl.load(
            partial + rows[:, None] * HEAD_DIM + dims[None, :], mask=real[:, None] & held[None, :], other=0.0
        )
        larger = tl.maximum(largest, tl.max(lse, 0))
        weights = tl.exp2(lse - larger)
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        largest = larger
    row = tl.cast(sequence, tl.int64) * num_heads + head
    result = acc / tl.where(num_chunks == 0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=held)


def paged_decode(
    out: Tensor,  # [>= S, Hq, D], of which the first S rows are written
    q: Tensor,  # [>= S, Hq, D]
    k_cache: Tensor,  # [num_blocks, Hk, block_size, D], D contiguous after block_size
    v_cache: Tensor,
    context_lens: Tensor,  # [>= S] int32; 0: no sequence, its output is 0
    block_tables: Tensor,  # [>= S, width] int32
    num_seqs: int,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),  # by which 8-bit keys and values are multiplied
    sinks: Tensor | None = None,  # [Hq] fp32
) -> None:
    """Compute attention of row s over the first `context_lens[s]` keys of sequence s, for the first `num_seqs` rows."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    shape = decode_tile(q, k_cache)
    block_d = max(MIN_ROWS, triton.next_power_of_2(head_dim))
    max_chunks = -(-multiprocessors(q.device) * CHUNKS_PER_MULTIPROCESSOR // num_kv_heads)
    partial = q.new_empty((max_chunks + num_seqs, num_heads, head_dim), dtype=torch.float32)
    partial_lse = q.new_empty((max_chunks + num_seqs, num_heads), dtype=torch.float32)
    seen = NO_WINDOW if window is None else window
    _decode[num_kv_heads, max_chunks + num_seqs](
        out,
        partial,
        partial_lse,
        q,
        q if sinks is None else sinks,
        kernel_view(k_cache),
        kernel_view(v_cache),
        context_lens,
        block_tables,
        num_seqs,
        max_chunks,
        seen,
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        scale * LOG2E * kv_scales[0],
        kv_scales[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(MIN_ROWS, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_N=shape.keys,
        SINKS=sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **dependent_launch(q.device),
    )
    _join[num_seqs, num_heads](
        out,
        partial,
        partial_lse,
        context_lens,
        num_seqs,
        max_chunks,
        seen,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_N=shape.keys,
        CHUNKS_PER_JOIN_STEP=CHUNKS_PER_JOIN_STEP if block_d <= 128 else CHUNKS_PER_JOIN_STEP // 2,
        num_warps=1,
        **dependent_launch(q.device),
    )
