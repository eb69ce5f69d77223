"""Time of each CPU kernel, and of whole decode steps, on one thread: `python -m labs.benchmarks.kernels_cpu`.

The model is a random Llama of 32 M parameters (hidden 512, 8 layers, 8 query and 4 key/value heads, FFN 1408,
vocabulary 8192). Layers take turns, so that weights and keys come from the same level of memory as in a step. Each
figure is the best of several runs; bytes are the least that must move, and the floor is their time at the bandwidth of
a sum over 256 MB.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from backend.kernels.cpu import select_ops
from backend.kernels.ops import Ops, RotaryHeads, StepInputs
from backend.model.decoder import Decoder
from backend.model.known_shapes import LLAMA_32M
from backend.model.weights import random_weights
from backend.paged_kv.kv_cache import KVCache

BLOCK_SIZE = 16
KINDS = ("native", "torch", "reference")
OF_STEPS = {
    "native": "none",
    "int8": "int8",
    "int4": "int4",
    "torch": "none",
}  # implementations, each with its quantization
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """A kernel's call, the bytes it must move and the floating-point operations it makes (0: not counted)."""

    name: str
    body: Callable[[], object]
    num_bytes: int
    operations: int = 0


def best_seconds(body: Callable[[], object], at_least: float = 0.15) -> float:
    """The quickest of repeated calls over `at_least` seconds, three at the fewest."""
    body()
    started = time.perf_counter()
    best, calls = float("inf"), 0
    while calls < 3 or time.perf_counter() - started < at_least:
        before = time.perf_counter()
        body()
        best, calls = min(best, time.perf_counter() - before), calls + 1
    return best


def bandwidth() -> float:
    """Bytes a second that one thread reads from memory."""
    x = torch.ones(64 << 20)
    return x.nbytes / best_seconds(x.sum)


def step_of(rows: int, count: int, context: int) -> StepInputs:
    """`rows` sequences that each compute their last `count` tokens of `context`, in shuffled blocks."""
    width = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * width).view(rows, width).int()
    positions = torch.arange(context - count, context)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepInputs(
        token_ids=torch.randint(LLAMA_32M.vocab_size, (rows * count,)),
        positions=positions.repeat(rows),
        slot_mapping=slots.flatten(),
        query_start=torch.arange(0, rows * count + 1, count, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        block_tables=tables,
        num_seqs=rows,
        max_query_len=count,
        max_context_len=context,
    )


class Bench:
    """One batch of one type: `rows` sequences at `context`, each computing `count` tokens."""

    def __init__(self, dtype: torch.dtype, rows: int, count: int, context: int) -> None:
        self.dtype, self.rows, self.count, self.context = dtype, rows, count, context
        self.tokens = rows * count
        self.step = step_of(rows, count, context)
        self.kv = KVCache(LLAMA_32M, rows * -(-context // BLOCK_SIZE), BLOCK_SIZE, dtype, CPU)
        self.kv.blocks.normal_()
        self.layers = cycle([(blocks[:, 0], blocks[:, 1]) for blocks in self.kv.blocks.unbind(1)])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def linears(self, ops: Ops) -> Iterator[Measured]:
        m = LLAMA_32M
        width = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
        yield self._linear(ops, "qkv", width, m.hidden_size, m.num_layers)
        yield self._linear(ops, "output", m.hidden_size, m.hidden_size, m.num_layers)
        yield self._linear(ops, "gate_up", 2 * m.intermediate_size, m.hidden_size, m.num_layers)
        yield self._linear(ops, "down", m.hidden_size, m.intermediate_size, m.num_layers)
        yield self._linear(ops, "lm_head", m.vocab_size, m.hidden_size, 1)

    def _linear(self, ops: Ops, name: str, n: int, k: int, copies: int) -> Measured:
        x = self.normal(self.tokens, k)
        products = cycle([ops.linear(self.normal(n, k), None) for _ in range(copies)])
        moved = (n * k + self.tokens * (n + k)) * self.dtype.itemsize
        return Measured(name, lambda: next(products)(x), moved, 2 * self.tokens * n * k)

    def rowwise(self, ops: Ops) -> Iterator[Measured]:
        x, weight = self.normal(self.tokens, LLAMA_32M.hidden_size), self.normal(LLAMA_32M.hidden_size)
        residual = torch.zeros_like(x)
        yield Measured("add_rms_norm", lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes)
        gate_up = self.normal(self.tokens, 2 * LLAMA_32M.intermediate_size)
        yield Measured("silu_mul", lambda: ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2)

    def attention(self, ops: Ops) -> Iterator[Measured]:
        heads, kv_heads, dim = LLAMA_32M.num_heads, LLAMA_32M.num_kv_heads, LLAMA_32M.head_dim
        qkv, q = self.normal(self.tokens, (heads + 2 * kv_heads) * dim), self.normal(self.tokens, heads, dim)
        rotation = RotaryHeads(heads, kv_heads, torch.randn(self.context, dim), None, None, 1e-5)

        def rope() -> Tensor:
            return ops.rope_and_store(qkv, rotation, *next(self.layers), step=self.step)

        def attend() -> Tensor:
            return ops.paged_attention(q, *next(self.layers), step=self.step, scale=dim**-0.5, window=None)

        pairs = self.rows * sum(range(self.context - self.count + 1, self.context + 1))
        kv_bytes = 2 * self.rows * self.context * kv_heads * dim * self.dtype.itemsize
        yield Measured("rope_and_store", rope, 2 * qkv.nbytes)
        yield Measured("paged_attention", attend, kv_bytes + 2 * q.nbytes, 4 * pairs * heads * dim)


def report_kernels(bench: Bench, peak: float) -> None:
    print(f"\n{bench.dtype}, {bench.rows} x {bench.count} tokens at context {bench.context}")
    print(f"{'kernel':16}{'by':>11}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}{'x floor':>9}")
    for kind in KINDS:
        ops = select_ops(CPU, bench.dtype, kind)
        for kernel in (*bench.linears(ops), *bench.rowwise(ops), *bench.attention(ops)):
            seconds = best_seconds(kernel.body, 0.05)
            rate = f"{kernel.operations / seconds / 1e9:9.1f}" if kernel.operations else " " * 9
            times = f"{kernel.name:16}{kind:>11}{seconds * 1e6:10.1f}{kernel.num_bytes / seconds / 1e9:8.1f}"
            print(f"{times}{rate}{seconds / kernel.num_bytes * peak:9.1f}")


def report_steps(dtype: torch.dtype, batches: list[int], context: int) -> None:
    for kind, quantization in OF_STEPS.items():
        ops = select_ops(CPU, dtype, kind if kind in KINDS else "native", None, quantization)
        decoder = Decoder(LLAMA_32M, random_weights(LLAMA_32M, dtype), ops, 8192)
        for rows in batches:
            bench = Bench(dtype, rows, 1, context)
            seconds = best_seconds(partial(decode_step, decoder, bench), 0.5)
            speed = f"{seconds * 1e3:8.2f} ms {rows / seconds:8.0f} tok/s"
            print(f"decode step  {dtype!s:15}{kind:>8} batch {rows:3} context {context}: {speed}", flush=True)


def decode_step(decoder: Decoder, bench: Bench) -> Tensor:
    return decoder.logits(decoder.forward(bench.step, bench.kv)).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64], metavar="N")
    parser.add_argument("--context", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--prefill", type=int, default=512, metavar="TOKENS", help="length of the prompt, 0 for none")
    parser.add_argument("--steps-only", action="store_true", help="whole decode steps, without each kernel")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    peak = bandwidth()
    print(f"one thread reads {peak / 1e9:.1f} GB/s")
    for name in options.dtype:
        dtype = DTYPES[name]
        report_steps(dtype, options.batch, options.context)
        if options.steps_only:
            continue
        for rows in options.batch:
            report_kernels(Bench(dtype, rows, 1, options.context), peak)
        if options.prefill:
            report_kernels(Bench(dtype, 1, options.prefill, options.prefill), peak)


if __name__ == "__main__":
    main()
