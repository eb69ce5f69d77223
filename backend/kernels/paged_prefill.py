"""Causal attention of ragged chunks of new tokens over their paged contexts (Dao, 2023).

A program takes a run of one sequence's new tokens for one KV head. Its rows are (token, query head) pairs, so that the
keys and values it reads serve every query head of the group, and short chunks still fill a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.triton_lang import (
    INTERPRETED,
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
    shared_memory,
)

MIN_WIDTH = 16  # of a tensor-core product


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """The (token, query head) rows of a program, the keys of one step of its loop, and the warps and stages that run
    it.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tile(q: Tensor, cache: Tensor) -> PrefillTile:
    """Return a tile that needs no spills and fits the shared memory; three stages copy keys and values one tile ahead.

    sm_90 to sm_110 multiply in groups of four warps, and want more keys at a time; sm_120, which came after them, has
    the instructions and the shared memory of sm_89.
    """
    head_dim = q.shape[2]
    if INTERPRETED.value:
        return PrefillTile(rows=32, keys=32, warps=4, stages=1)
    if q.dtype == torch.float32:
        return (
            PrefillTile(rows=16, keys=64, warps=8, stages=1)
            if head_dim <= 128
            else PrefillTile(16, 16, warps=8, stages=2)
        )
    grouped = (9, 0) <= capability(q.device) < (12, 0)
    converted = cache.itemsize == 1
    if head_dim <= 64 and capability(q.device) >= (12, 0):
        return PrefillTile(rows=64, keys=32, warps=4, stages=3)  # on sm_120 twice as many rows and warps spill
    if head_dim <= 128:
        spills = head_dim <= 64 and capability(q.device) >= (10, 0)  # with twice as many keys
        return PrefillTile(rows=128, keys=64 if grouped and not spills else 32, warps=8, stages=3)
    roomy = shared_memory(capability(q.device)) >= 163 * 1024 and not converted
    return PrefillTile(
        rows=128 if grouped and not converted else 64, keys=32 if grouped or roomy else 16, warps=8, stages=3
    )


@triton.jit
def _block(start, offsets, BLOCK_SIZE: tl.constexpr):
    """Return the places in a block table of the keys at start + offsets, where start is a multiple of their number."""
    if offsets.shape[0] % BLOCK_SIZE == 0:  # values that are the same in every tile are computed once
        result = start // BLOCK_SIZE + offsets // BLOCK_SIZE
    else:
        result = (start + offsets) // BLOCK_SIZE
    return result


@triton.jit
def _place(start, offsets, BLOCK_SIZE: tl.constexpr):
    """Return the places of the same keys in their blocks."""
    return offsets % BLOCK_SIZE if offsets.shape[0] % BLOCK_SIZE == 0 else (start + offsets) % BLOCK_SIZE


@triton.jit
def _attend(
    query,
    largest,
    total,
    positions,
    begin,
    end,
    plain_begin,
    plain_end,
    k_head,
    v_head,
    table,
    block_stride,
    qk_scale,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return sums of weights and weighted values over the keys in [begin, end), where begin is a multiple of BLOCK_N,
    and before them as `triton_lang.begun`.

    Every row sees all of the keys in [plain_begin, plain_end).

    Block ids are loaded into registers a tile before they are used: otherwise the compiler would spend a stage of its
    pipeline on them, and wait for keys and values just after it began to copy them.
    """
    real = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    dims = tl.arange(0, BLOCK_D)[None, :]
    offsets = tl.arange(0, BLOCK_N)
    acc = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    next_blocks = tl.load(table + _block(begin, offsets, BLOCK_SIZE), mask=begin + offsets < end, other=0)
    for start in range(begin, end, BLOCK_N):
        keys = start + offsets
        places = next_blocks.to(tl.int64) * block_stride + _place(start, offsets, BLOCK_SIZE) * HEAD_DIM
        next_blocks = tl.load(table + _block(start + BLOCK_N, offsets, BLOCK_SIZE), mask=keys + BLOCK_N < end, other=0)
        k = from_cache(tl.load(k_head + places[:, None] + dims, mask=real, other=0.0), query.dtype)
        held = real & (keys < end)[:, None]
        v = from_cache(tl.load(v_head + places[:, None] + dims, mask=held, other=0.0), query.dtype)
        scores = dot(query, tl.trans(k), tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        if (start < plain_begin) | (start + BLOCK_N > plain_end):
            distance = positions[:, None] - keys[None, :]
            scores = tl.where((distance >= 0) & (distance < window), scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1) * qk_scale)
        anchor = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(scores * qk_scale - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(query.dtype), v, acc * shrink[:, None])
        largest = larger
    return total, acc


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "window", "table_stride"])
def _prefill(
    out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    sinks,  # [Hq] fp32
    k_cache,
    v_cache,
    query_start,
    context_lens,
    block_tables,
    first_seq,
    num_seqs,
    window,
    table_stride,
    block_stride,
    head_stride,
    qk_scale,  # includes log2(e) and the scale of 8-bit keys
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    item = tl.num_programs(0) - 1 - tl.program_id(0)  # the last runs of a prompt see the most keys, so they start first
    head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    sequence, first, before = 0, 0, 0
    for base in range(0, num_seqs - first_seq, SCAN):
        sequences = base + tl.arange(0, SCAN)
        real = sequences < num_seqs - first_seq
        begins = tl.load(query_start + first_seq + sequences, mask=real, other=0)
        ends = tl.load(query_start + first_seq + sequences + 1, mask=real, other=0)
        counts = tl.cdiv(ends - begins, TOKENS)
        sequence, first, before = advance(item, sequences, counts, num_seqs - first_seq, sequence, first, before)
    sequence += first_seq
    await_inputs(PDL)
    if sequence >= num_seqs:
        return

    start = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    row = tl.arange(0, BLOCK_M)
    token = (item - first) * TOKENS + row // GROUP  # index among the sequence's new tokens
    real = (token < length) & (row < TOKENS * GROUP)
    lowest = context - length + (item - first) * TOKENS
    highest = tl.minimum(lowest + TOKENS, context) - 1
    positions = tl.where(real, context - length + token, highest)

    dims = tl.arange(0, BLOCK_D)
    held = real[:, None] & (dims < HEAD_DIM)[None, :]
    places = ((start + token).to(tl.int64) * num_heads + head * GROUP + row % GROUP) * HEAD_DIM
    query = tl.load(q + places[:, None] + dims[None, :], mask=held, other=0.0)
    table = block_tables + tl.cast(sequence, tl.int64) * table_stride
    k_head = k_cache + head.to(tl.int64) * head_stride
    v_head = v_cache + head.to(tl.int64) * head_stride

    begin, plain_begin, plain_end = 0, 0, (lowest + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        plain_begin = highest - window + 1
    largest, total = begun(sinks, head * GROUP + row % GROUP, True, SINKS)
    total, acc = _attend(
        query, largest, total, positions, begin, highest + 1, plain_begin, plain_end, k_head, v_head, table,
        block_stride, qk_scale, window, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc = acc * (v_scale / total)[:, None]
    tl.store(out + places[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=held)


def paged_prefill(
    out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [num_blocks, Hk, block_size, D], D contiguous after block_size
    v_cache: Tensor,
    query_start: Tensor,  # [S + 1] int32
    context_lens: Tensor,  # [S] int32
    block_tables: Tensor,  # [S, width] int32
    first_seq: int,
    num_seqs: int,
    num_tokens: int,  # at least the tokens of sequences from `first_seq` on
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),  # by which 8-bit keys and values are multiplied
    sinks: Tensor | None = None,  # [Hq] fp32
) -> None:
    """Compute attention of the new tokens of sequences [first_seq, num_seqs), whose own keys are in the cache.

    The launch depends on the numbers of sequences and tokens alone.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    keys, values = kernel_view(k_cache), kernel_view(v_cache)
    shape = prefill_tile(q, keys)
    rows = max(shape.rows, triton.next_power_of_2(group))
    runs = num_tokens // (rows // group) + num_seqs - first_seq
    _prefill[runs, num_kv_heads](
        out,
        q,
        q if sinks is None else sinks,
        keys,
        values,
        query_start,
        context_lens,
        block_tables,
        first_seq,
        num_seqs,
        NO_WINDOW if window is None else window,
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        scale * LOG2E * kv_scales[0],
        kv_scales[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=rows,
        BLOCK_D=max(MIN_WIDTH, triton.next_power_of_2(head_dim)),
        BLOCK_N=shape.keys,
        WINDOWED=window is not None,
        SINKS=sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **dependent_launch(q.device),
    )
