"""Experts on a GPU: the router's choices grouped by expert, and products of each group with its expert's weights.

Nothing is sorted and the host reads nothing back. A choice is a token's n-th expert, number `token * per_token + n`.
The first kernel writes each expert's choices to its row of `members`, in any order: results are written to the places
of their choices, so that the order changes no bit. Each product's tile then finds its expert by the counts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.ops import ExpertWeights, Linear
from backend.kernels.triton_lang import dot, gated

MIN_ROWS, MAX_ROWS = 16, 64  # of a tile


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(
    logits,  # [T, experts]
    weights,  # [T, PER_TOKEN]
    members,  # [experts, T]
    counts,  # [experts], 0
    num_tokens,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Choose the experts of one token, the most probable first and of equal ones the first."""
    token, columns, places = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    is_expert = columns < EXPERTS
    row = tl.load(logits + token * EXPERTS + columns, mask=is_expert, other=-float("inf")).to(tl.float32)
    shares = tl.where(is_expert, tl.exp(row - tl.max(row, 0)), -1.0)
    total = tl.sum(tl.where(is_expert, shares, 0.0), 0)
    shares = tl.where(shares >= -1.0, shares, 0.0)  # a row of NaN takes each expert once, as others do
    chosen = tl.zeros([BLOCK_N], tl.int32)
    found = tl.zeros([BLOCK_N], tl.float32)
    for n in range(PER_TOKEN):
        largest = tl.max(shares, 0)
        best = tl.min(tl.where(shares == largest, columns, EXPERTS - 1), 0)
        chosen = tl.where(places == n, best, chosen)
        found = tl.where(places == n, largest / total, found)
        shares = tl.where(columns == best, -1.0, shares)
    if NORMALISES:
        found /= tl.sum(found, 0)
    is_place = places < PER_TOKEN
    tl.store(weights + token * PER_TOKEN + places, found.to(weights.dtype.element_ty), mask=is_place)
    rank = tl.atomic_add(counts + chosen, 1, mask=is_place)
    tl.store(members + chosen.to(tl.int64) * num_tokens + rank, token * PER_TOKEN + places, mask=is_place)


@triton.jit(do_not_specialize=["num_tokens", "slope", "limit"])
def _multiply_groups(
    out,  # [T * PER_TOKEN, WIDTH]
    x,  # [T, DEPTH] if GATED, else [T * PER_TOKEN, DEPTH]
    weight,  # [experts, WIDTH, DEPTH]; [experts, 2 * WIDTH, DEPTH] if GATED, gates first, or in turns if CLAMPED
    bias,  # of the weight's rows, if BIASED
    weights,  # [T * PER_TOKEN], of the results unless GATED
    members,
    counts,
    num_tokens,
    slope,
    limit,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute some columns of the results of up to BLOCK_M choices of one expert."""
    tile, experts = tl.program_id(1), tl.arange(0, BLOCK_E)
    members_of = tl.load(counts + experts, mask=experts < EXPERTS, other=0)
    tiles = (members_of + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        first = (tile - tl.sum(tl.where(experts < expert, tiles, 0), 0)) * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        held = rows < tl.sum(tl.where(experts == expert, members_of, 0), 0)
        choices = tl.load(members + expert.to(tl.int64) * num_tokens + rows, mask=held, other=0).to(tl.int64)
        inputs = x + (choices // PER_TOKEN if GATED else choices) * DEPTH
        columns, depth = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        is_column = columns < WIDTH
        gate_rows = expert.to(tl.int64) * (2 * WIDTH if GATED else WIDTH) + (2 * columns if CLAMPED else columns)
        up_rows = gate_rows + (1 if CLAMPED else WIDTH)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, DEPTH, BLOCK_K):
            places = start + depth
            is_input = places < DEPTH
            real = is_input[:, None] & is_column[None, :]
            part = tl.load(inputs[:, None] + places[None, :], mask=held[:, None] & is_input[None, :], other=0.0)
            gates = tl.load(weight + gate_rows[None, :] * DEPTH + places[:, None], mask=real, other=0.0)
            acc = dot(part, gates, acc)
            if GATED:
                ups = tl.load(weight + up_rows[None, :] * DEPTH + places[:, None], mask=real, other=0.0)
                up = dot(part, ups, up)
        if BIASED:
            acc += tl.load(bias + gate_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias + up_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
        result = acc.to(out.dtype.element_ty)
        if GATED and CLAMPED:
            gate = tl.minimum(result.to(tl.float32), limit)
            up = tl.clamp(up.to(result.dtype).to(tl.float32), -limit, limit)
            result = ((up + 1) * gate / (1 + tl.exp(-slope * gate))).to(result.dtype)
        elif GATED:
            result = gated(result, up.to(result.dtype))
        else:
            scales = tl.load(weights + choices, mask=held, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) * scales[:, None]).to(result.dtype)
        stored = held[:, None] & is_column[None, :]
        tl.store(out + choices[:, None] * WIDTH + columns[None, :], result, mask=stored)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The result of `Ops.experts` on a GPU."""

    router: Linear
    weights: ExpertWeights

    def __call__(self, x: Tensor) -> Tensor:
        tokens, experts, per_token = x.shape[0], len(self.weights.router), self.weights.per_token
        weights = x.new_empty((tokens, per_token))
        members = torch.empty((experts, tokens), dtype=torch.int32, device=x.device)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        _choose[(tokens,)](
            self.router(x),
            weights,
            members,
            counts,
            tokens,
            EXPERTS=experts,
            PER_TOKEN=per_token,
            NORMALISES=self.weights.normalises,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_N=triton.next_power_of_2(per_token),
            num_warps=1 if experts <= 256 else 4,
        )
        hidden = x.new_empty((tokens * per_token, self.weights.down.shape[2]))
        own = self.weights
        self._multiply(hidden, x, own.gate_up, own.gate_up_bias, weights, members, counts, gates=True)
        results = x.new_empty((tokens * per_token, x.shape[1]))
        self._multiply(results, hidden, own.down, own.down_bias, weights, members, counts, gates=False)
        return results.view(tokens, per_token, -1).sum(1)

    def _multiply(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        members: Tensor,
        counts: Tensor,
        gates: bool,
    ) -> None:
        (choices, width), (experts, tokens) = out.shape, members.shape
        rows = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(choices // experts)))
        columns, depth = (64, 64) if x.itemsize == 2 else (32, 32)  # fp32 in three parts takes more registers
        slope, limit = self.weights.clamp or (0.0, 0.0)
        most_tiles = min(experts, choices) + choices // rows
        _multiply_groups[(triton.cdiv(width, columns), most_tiles)](
            out,
            x,
            weight,
            weight if bias is None else bias,
            weights,
            members,
            counts,
            tokens,
            slope,
            limit,
            WIDTH=width,
            DEPTH=x.shape[1],
            EXPERTS=experts,
            PER_TOKEN=choices // tokens,
            GATED=gates,
            CLAMPED=gates and self.weights.clamp is not None,
            BIASED=bias is not None,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_M=rows,
            BLOCK_N=columns,
            BLOCK_K=depth,
            num_warps=4,
            num_stages=4,
        )
