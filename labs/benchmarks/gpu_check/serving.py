"""Attention and stores in the shapes that serve, against the reference: every head, group, cache and length of use.

Weighted means of many values are small, and a bound on their difference alone would hold for kernels that are wrong:
the error of each row is told as a share of the row's own length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from backend.kernels.ops import Ops, RotaryHeads, StepInputs
from backend.kernels.reference import ReferenceOps
from backend.kernels.triton_lang import FP8
from backend.kernels.triton_ops import TritonOps
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.kernels_gpu import BLOCK_SIZE

MAX_ROW_ERROR_SHARE = 0.02  # of a row's length; bf16 rounds to 1/256
KV_HEADS = 2
SHARPENED = 3  # times the queries, so that some keys weigh more than others
PADDING = 3  # places without a sequence, and tokens of none, in a step of a graph


@dataclass(frozen=True, slots=True)
class Serving:
    """Sequences by their new tokens and context, decodes first."""

    name: str
    spans: tuple[tuple[int, int], ...]
    window: int | None = None

    @property
    def num_decodes(self) -> int:
        return sum(count == 1 for count, _ in self.spans)


LONG = (
    Serving("prompts of 300 to 2,000 tokens", ((300, 300), (777, 777), (2000, 2000))),
    Serving("a chunk of a prompt beside decodes", ((1, 2500), (1, 40), (1, 1111), (512, 1800))),
    Serving("decodes of many chunks", ((1, 4000), (1, 300), (1, 8100), (1, 1), (1, 2049))),
    Serving("a window", ((1, 3000), (1, 100), (700, 1500)), window=1024),
)
SHORT = (Serving("a chunk of a prompt beside decodes", ((1, 40), (1, 7), (5, 20))),)
SHORT_WINDOW = (Serving("a window", ((1, 40), (1, 7), (5, 20)), window=16),)

Shape = tuple[int, int, torch.dtype]
"""The numbers of a head, the query heads of a group, and the type of cached keys and values."""

SHAPES: tuple[Shape, ...] = tuple(product((64, 128), (1, 4, 7), (torch.bfloat16, FP8)))


def check(device: torch.device) -> Iterator[Finding]:
    gpu = device.type == "cuda"
    for shape in SHAPES if gpu else [(64, 7, torch.bfloat16), (64, 7, FP8)]:
        head_dim, group, kv_dtype = shape
        cache = "bf16" if kv_dtype == torch.bfloat16 else "8-bit"
        what = f"heads of {head_dim}, groups of {group}, bf16 over a {cache} cache: error of a row"
        yield Finding(what, largest_error(device, shape, LONG if gpu else SHORT), bound=MAX_ROW_ERROR_SHARE, exact=True)


def largest_error(device: torch.device, shape: Shape, steps: tuple[Serving, ...]) -> float:
    """Return the largest error of any row of these steps, unpadded and padded as a graph's."""
    every = product(steps, (False, True))
    return max(_error(_step(serving, device, padded), serving.window, *shape) for serving, padded in every)


def _step(serving: Serving, device: torch.device, padded: bool) -> StepInputs:
    """A step with shuffled blocks; block 0 belongs to no sequence. Padded as a graph's step is."""
    spans = list(serving.spans)
    if padded:
        spans[serving.num_decodes : serving.num_decodes] = [(0, 0)] * (PADDING if serving.num_decodes else 0)
        spans += [(0, 0)] * PADDING
    needed = [-(-context // BLOCK_SIZE) for _, context in spans]
    dealt = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).int().split(needed)
    tables = torch.zeros((len(spans), max(needed)), dtype=torch.int32)
    positions, slots = [], []
    for table, blocks, (count, context) in zip(tables, dealt, spans, strict=True):
        table[: len(blocks)] = blocks
        new = torch.arange(context - count, context)
        positions.append(new)
        slots.append(table[new // BLOCK_SIZE].long() * BLOCK_SIZE + new % BLOCK_SIZE)
    if padded:
        positions.append(torch.zeros(PADDING, dtype=torch.int64))
        slots.append(torch.full((PADDING,), -1))
    counts = torch.tensor([0] + [count for count, _ in spans])
    places = serving.num_decodes + (PADDING if padded and serving.num_decodes else 0)
    return StepInputs(
        token_ids=torch.zeros(sum(map(len, positions)), dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_start=counts.cumsum(0).int().to(device),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_seqs=len(spans),
        max_query_len=int(counts.max()),
        max_context_len=max(context for _, context in spans),
        num_decodes=places,
    )


def _error(step: StepInputs, window: int | None, head_dim: int, group: int, kv_dtype: torch.dtype) -> float:
    """Return the largest error of any row of queries, of attention, and of stored keys and values."""
    device, heads = step.positions.device, group * KV_HEADS
    generator = torch.Generator(device).manual_seed(head_dim + group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    pool = normal(int(step.block_tables.max()) + 1, 2, 2, KV_HEADS, BLOCK_SIZE, head_dim).to(kv_dtype)
    qkv = normal(len(step.positions), (heads + 2 * KV_HEADS) * head_dim)
    speeds = 0.7 ** torch.arange(head_dim // 2, device=device)
    turns = torch.outer(torch.arange(step.max_context_len, device=device), speeds)
    rotation = RotaryHeads(heads, KV_HEADS, torch.cat((turns.cos(), turns.sin()), 1), None, None, 1e-5)

    def stored(ops: Ops) -> tuple[Tensor, Tensor]:
        cache = pool.clone()
        views = cache[:, 1, 0], cache[:, 1, 1]
        return ops.rope_and_store(qkv, rotation, *views, step), cache

    (query, cache), (found_query, found_cache) = stored(ReferenceOps()), stored(TritonOps())
    keys_and_values = cache[:, 1, 0], cache[:, 1, 1]
    expected, found = (
        ops.paged_attention(SHARPENED * query, *keys_and_values, step, head_dim**-0.5, window)
        for ops in (ReferenceOps(), TritonOps())
    )
    real = int(step.query_start[-1])
    return max(
        _row_error(found[:real], expected[:real]),
        _row_error(found_query[:real], query[:real]),
        _stored_error(found_cache, cache),
    )


def _row_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1).clamp(min=1e-6)).max())


def _stored_error(found: Tensor, expected: Tensor) -> float:
    """The error of stored values; in 8 bits a value may be the next one, because of rounding."""
    if expected.dtype != FP8:
        return _row_error(found, expected)
    apart = (found.float() - expected.float()).abs() > expected.float().abs() / 8 + 2**-9
    return float(apart.any())
