"""Compares an implementation with the reference on small inputs, because a library may be old or damaged."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from backend.kernels import reference
from backend.kernels.experts import clamped_mul
from backend.kernels.integers import StoredWeight, rounded
from backend.kernels.ops import ExpertWeights, Ops, RotaryHeads, StepAdapters, StepInputs

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 32, 4
EPS = 1e-5
_CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def disagreements(ops: Ops, dtype: torch.dtype, device: torch.device = _CPU) -> list[str]:
    """Return the names of the functions of `ops` whose results on a small ragged step differ from the reference's."""
    draw = _Draw(dtype, device)
    step = small_step(device)
    qkv = draw(step.positions.numel(), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q_norm, k_norm, cos_sin = draw(HEAD_DIM), draw(HEAD_DIM), draw(32, HEAD_DIM).float()
    rotation = RotaryHeads(HEADS, KV_HEADS, cos_sin, q_norm, k_norm, EPS)
    found_kv = draw(8, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    kv = found_kv.clone()

    def rope(by: Ops, into: Tensor) -> Tensor:
        return by.rope_and_store(qkv, rotation, into[:, 0], into[:, 1], step)

    def attend(by: Ops, sinks: Tensor | None = None) -> Tensor:
        return by.paged_attention(q, kv[:, 0], kv[:, 1], step, HEAD_DIM**-0.5, 5, sinks)

    oracle: Ops = reference.ReferenceOps()
    q, found_q = rope(oracle, kv), rope(ops, found_kv)
    x, residual, weight = draw(3, 80), draw(3, 80), draw(80)
    matrix, bias = draw(21, 80), draw(21)
    sinks = draw(HEADS).float()
    # logits are exact: all choose the same; and the router has the shape of `matrix`, as each shape is compiled
    router, gate_up, down = torch.eye(21, 80, dtype=dtype, device=device), draw(21, 96, 80) / 8, draw(21, 80, 48) / 8
    experts = ExpertWeights(router, gate_up, down, 2, True, router_bias=torch.zeros_like(bias))
    pairs = {
        "linear": (reference.linear(matrix, bias)(x), ops.linear(matrix, bias)(x)),
        "rms_norm": (reference.rms_norm(x, weight, EPS), ops.rms_norm(x, weight, EPS)),
        "add_rms_norm": (
            reference.add_rms_norm(x, residual.clone(), weight, EPS),
            ops.add_rms_norm(x, residual.clone(), weight, EPS),
        ),
        "experts": (reference.experts(experts)(x), ops.experts(experts)(x)),
        "silu_mul": (reference.silu_mul(x), ops.silu_mul(x)),
        "gelu_mul": (reference.gelu_mul(x), ops.gelu_mul(x)),
        "rope_and_store": (torch.cat((q.flatten(), kv.flatten())), torch.cat((found_q.flatten(), found_kv.flatten()))),
        "paged_attention": (attend(oracle), attend(ops)),
        "paged_attention with sinks": (attend(oracle, sinks), attend(ops, sinks)),
    }
    for bits in (4, 8):
        stored, x = StoredWeight((21, 96), dtype, (partial(rounded, draw(21, 96) / 16, bits),)), draw(3, 96)
        pairs[f"linear of {bits} bits"] = (reference.linear(stored, bias)(x), ops.linear(stored, bias)(x))
    adapted, found_adapted = (draw(step.positions.numel(), 84) for _ in range(2))
    found_adapted.copy_(adapted)
    wide, with_adapters = draw(len(adapted), 80), replace(step, adapters=_some_adapters(draw, len(adapted)))
    reference.adapt(adapted, wide, with_adapters, 1, 0)
    ops.adapt(found_adapted, wide, with_adapters, 1, 0)
    pairs["adapt"] = (adapted, found_adapted)
    masked, expected = (torch.zeros((3, 75), device=device) for _ in range(2))
    bitmasks = torch.tensor([[0x55AA00FF, -1, 2], [0, -1, 0x700]], dtype=torch.int32, device=device)
    indices = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    ops.apply_token_bitmask(masked, bitmasks, indices)
    reference.apply_token_bitmask(expected, bitmasks, indices)
    pairs["apply_token_bitmask"] = (expected, masked)
    tolerance = TOLERANCE[dtype]
    return [name for name, (a, b) in pairs.items() if not torch.allclose(a.float(), b.float(), tolerance, tolerance)]


def _some_adapters(draw: "_Draw", num_tokens: int) -> StepAdapters:
    """Return two adapters, of parts with 1 to 3 of at most 3 vectors, for most tokens."""
    rows = (torch.arange(num_tokens, dtype=torch.int32, device=draw.device) // 2 % 3 - 1).int()
    parts, memory = ((67, 7, 10), (80,), (80, 80), (80,)), draw(16 * 80).view(-1)
    vectors = torch.full((2, 2, 2 * 3 * sum(map(len, parts))), -1, dtype=torch.int64, device=draw.device)
    vectors[:, 1, :18] = torch.arange(18, device=draw.device) * 64
    vectors[0, 1, [2, 8, 11, 17]] = -1
    vectors[1, 1, [1, 2, 4, 5, 10, 11, 13, 14]] = -1
    return StepAdapters(rows, vectors, memory, 3, parts)


def batch_dependent(ops: Ops, dtype: torch.dtype) -> list[str]:
    """Return the names of the functions of `ops` by which a row's result changes, in any bit, with the rows beside it,
    and of those of torch and numpy from which sampling expects the same.
    """
    draw = _Draw(dtype, _CPU)
    rows, weight = draw(19, 70), draw(70)
    rowwise: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": ops.linear(draw(33, 70), None),
        "rms_norm": lambda x: ops.rms_norm(x, weight, EPS),
        "silu_mul": ops.silu_mul,
        "gelu_mul": ops.gelu_mul,
        "clamped_mul": partial(clamped_mul, clamp=(1.702, 7.0), silu_mul=ops.silu_mul),
        "exp": lambda x: torch.from_numpy(np.exp(x.float().numpy())),
        "log": lambda x: x.float().abs().log(),
        "cumsum": lambda x: x.float().cumsum(-1, dtype=torch.float64),
    }
    varying = [name for name, body in rowwise.items() if not _same_in_parts(body, rows)]
    varying += ["adapt"] * _adapters_vary(ops, draw, rows)
    return varying + ["paged_attention"] * _attention_varies(ops, draw)


def _adapters_vary(ops: Ops, draw: "_Draw", x: Tensor) -> bool:
    """Return True if the products of adapters of a row depend on the rows beside it."""
    adapters, wide, before = _some_adapters(draw, len(x)), draw(len(x), 80), draw(len(x), 84)

    def adapted(size: int) -> Tensor:
        out = before.clone()
        for target, given, rows in zip(out.split(size), wide.split(size), adapters.rows.split(size), strict=True):
            ops.adapt(target, given, replace(small_step(), adapters=replace(adapters, rows=rows)), 1, 0)
        return out

    return not all(torch.equal(adapted(size), adapted(len(x))) for size in (1, 2, 7, 16))


def _same_in_parts(body: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    whole = body(x)
    return all(torch.equal(torch.cat([body(part.clone()) for part in x.split(size)]), whole) for size in (1, 2, 7, 16))


def _attention_varies(ops: Ops, draw: "_Draw") -> bool:
    """Return True if the attention of a prompt of 90 tokens, all in one block, depends on how it is cut into chunks."""
    tokens = 90
    q, kv = draw(tokens, HEADS, HEAD_DIM), draw(1, 2, KV_HEADS, tokens, HEAD_DIM)

    def attend(size: int) -> Tensor:
        chunks = ((n, min(n + size, tokens)) for n in range(0, tokens, size))
        keys, values = kv[:, 0], kv[:, 1]
        return torch.cat(
            [ops.paged_attention(q[a:b].clone(), keys, values, _chunk(a, b), HEAD_DIM**-0.5, 70) for a, b in chunks]
        )

    return not all(torch.equal(attend(size), attend(tokens)) for size in (1, 5, 33))


def _chunk(first: int, stop: int) -> StepInputs:
    """Return the tokens [first, stop) of a sequence whose context lies in block 0."""
    positions, count = torch.arange(first, stop), stop - first
    return StepInputs(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=positions,
        slot_mapping=positions,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([stop], dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        num_seqs=1,
        max_query_len=count,
        max_context_len=stop,
    )


def small_step(device: torch.device = _CPU) -> StepInputs:
    """Return a step with a decode row at position 9, a chunk of 3 from position 4, and a fresh prompt of 5 tokens."""
    tables = torch.tensor([[7, 2, 5], [1, 4, 0], [3, 6, 0]], dtype=torch.int32)
    contexts, counts = (10, 7, 5), (1, 3, 5)
    spans = [torch.arange(context - count, context) for context, count in zip(contexts, counts, strict=True)]
    slots = [tables[s][span // BLOCK_SIZE].long() * BLOCK_SIZE + span % BLOCK_SIZE for s, span in enumerate(spans)]
    return StepInputs(
        token_ids=torch.zeros(9, dtype=torch.int64, device=device),
        positions=torch.cat(spans).to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_start=torch.tensor([0, 1, 4, 9], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_seqs=3,
        max_query_len=5,
        max_context_len=10,
        num_decodes=1,
    )


class _Draw:
    """Draws normal numbers of one type, the same in every run of the program."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)
