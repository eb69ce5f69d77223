"""Time of each Triton kernel against its floor: `python -m labs.benchmarks.kernels_gpu [--json FILE]`.

The floor of a kernel is the time of its bytes at the bandwidth of a large copy, or of its operations at the rate of a
large matrix product, whichever is longer; the fraction is floor over time. Calls take turns over as many layers as keep
their data out of the caches, in one CUDA graph, so that launching is not in the time.

Without a GPU (`TRITON_INTERPRET=1`) everything runs once, in the interpreter, at sizes that only show that it runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from backend.kernels.ops import RotaryHeads, RowPenalties, RowSampling, StepInputs
from backend.kernels.sampling import sample_rows
from backend.kernels.self_check import disagreements
from backend.kernels.triton_ops import TritonOps
from backend.model.known_shapes import LLAMA_3_8B, QWEN3_06B
from backend.model.model_config import ModelConfig

BLOCK_SIZE = 16
CACHED_BYTES = 256 << 20  # calls take turns over at least this much
MOST_TURNS = 4096  # of small buffers, where launching is most of the time
REPEATS = 20
SMALL = replace(
    LLAMA_3_8B, vocab_size=500, hidden_size=96, intermediate_size=80, num_heads=4, num_kv_heads=2, head_dim=64
)


@dataclass(frozen=True)
class Workload:
    """Sequences that each compute `tokens` of their `context`."""

    sequences: int
    tokens: int
    context: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens} at {self.context}"


DECODES = (Workload(1, 1, 1024), Workload(64, 1, 1024), Workload(64, 1, 4096), Workload(256, 1, 1024))
PREFILLS = (Workload(1, 8192, 8192), Workload(8, 512, 2048))
SMALL_DECODES, SMALL_PREFILLS = (Workload(3, 1, 70),), (Workload(2, 9, 40),)


@dataclass(frozen=True)
class Peaks:
    """The measured peak rates of the device."""

    bandwidth: float  # bytes/s, read and written
    matrix_rate: float  # FLOP/s


@dataclass(frozen=True)
class Measured:
    kernel: str
    shape: str
    workload: str
    seconds: float
    num_bytes: int
    operations: int
    floor: float  # seconds

    @property
    def fraction(self) -> float:
        return self.floor / self.seconds


class Bench:
    """The kernels of one shape and type on one device."""

    def __init__(self, name: str, shape: ModelConfig, dtype: torch.dtype, device: torch.device, peaks: Peaks) -> None:
        self.name, self.shape, self.dtype, self.device, self.peaks = name, shape, dtype, device, peaks
        self.ops = TritonOps()

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=dtype or self.dtype)

    def attention(self, workload: Workload) -> Iterator[Measured]:
        """Storing the step's keys and values, and attending to all."""
        shape, step = self.shape, step_of(workload, self.device)
        rows = workload.sequences * workload.tokens
        kv_bytes = 2 * workload.sequences * workload.context * shape.num_kv_heads * shape.head_dim * self.dtype.itemsize
        layers = max(turns(kv_bytes), shape.num_layers if self.device.type == "cuda" else 1)  # as far apart as in use
        blocks = workload.sequences * -(-workload.context // BLOCK_SIZE)
        pool = self.normal(blocks, layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        caches = cycle([(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(layers)])
        q = self.normal(rows, shape.num_heads, shape.head_dim)
        qkv = self.normal(rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        cos_sin = self.normal(workload.context, shape.head_dim, dtype=torch.float32)
        rotation = RotaryHeads(shape.num_heads, shape.num_kv_heads, cos_sin, None, None, 1e-5)
        pairs = workload.sequences * sum(range(workload.context - workload.tokens + 1, workload.context + 1))
        yield self._measure(
            "rope and store",
            workload,
            lambda: self.ops.rope_and_store(qkv, rotation, *next(caches), step),
            2 * qkv.nbytes,
        )
        yield self._measure(
            "decode attention" if workload.tokens == 1 else "prefill attention",
            workload,
            lambda: self.ops.paged_attention(q, *next(caches), step, shape.head_dim**-0.5, None),
            kv_bytes + 2 * q.nbytes,
            4 * pairs * shape.num_heads * shape.head_dim,
            layers,
        )

    def rowwise(self, workload: Workload) -> Iterator[Measured]:
        rows, hidden, inner = workload.sequences * workload.tokens, self.shape.hidden_size, self.shape.intermediate_size
        weight = self.normal(hidden)
        copies = turns(rows * hidden * self.dtype.itemsize)
        pairs = cycle([(self.normal(rows, hidden), self.normal(rows, hidden)) for _ in range(copies)])
        moved = 4 * rows * hidden * self.dtype.itemsize
        norm = lambda: self.ops.add_rms_norm(*next(pairs), weight, 1e-5)  # noqa: E731
        yield self._measure("add and RMS norm", workload, norm, moved, turns=copies)
        copies = turns(2 * rows * inner * self.dtype.itemsize)
        inputs = cycle([self.normal(rows, 2 * inner) for _ in range(copies)])
        moved = 3 * rows * inner * self.dtype.itemsize
        yield self._measure("SiLU and multiply", workload, lambda: self.ops.silu_mul(next(inputs)), moved, turns=copies)

    def products(self, workload: Workload) -> Iterator[Measured]:
        """The products of a layer and, if every row is sampled, the last one; each weight is read once."""
        shape = self.shape
        query, inner = shape.num_heads * shape.head_dim, shape.intermediate_size
        sizes = {
            "QKV": (shape.hidden_size, query + 2 * shape.num_kv_heads * shape.head_dim),
            "output": (query, shape.hidden_size),
            "gate and up": (shape.hidden_size, 2 * inner),
            "down": (inner, shape.hidden_size),
        }
        if workload.tokens == 1:
            sizes["logits"] = (shape.hidden_size, shape.vocab_size)
        for name, (width, height) in sizes.items():
            yield self._product(f"product: {name}", workload, width, height)

    def _product(self, name: str, workload: Workload, width: int, height: int) -> Measured:
        rows = workload.sequences * workload.tokens
        copies = turns(width * height * self.dtype.itemsize)
        linears = cycle([self.ops.linear(self.normal(height, width), None) for _ in range(copies)])
        x = self.normal(rows, width)
        moved = (width * height + rows * (width + height)) * self.dtype.itemsize
        return self._measure(name, workload, lambda: next(linears)(x), moved, 2 * rows * width * height, copies)

    def sampling(self, workload: Workload) -> Iterator[Measured]:
        """One row a sequence: unfiltered, with top-k and top-p, of flat logits, one row alone of the flattest among
        unfiltered ones, and with penalties besides.
        """
        rows, vocab = workload.sequences, self.shape.vocab_size
        logits = self.normal(rows, vocab, dtype=torch.float32) * 4
        penalties = RowPenalties(
            torch.arange(rows, device=self.device),
            *(torch.full((rows,), strength, device=self.device) for strength in (0.1, 0.1, 1.1)),
            torch.zeros((rows, vocab), dtype=torch.bool, device=self.device),
            torch.zeros((rows, vocab), dtype=torch.int32, device=self.device),
        )
        plain, filtered = rows_drawn(rows, 0, 1.0, self.device), rows_drawn(rows, 50, 0.9, self.device)
        yield self._measure("sampling", workload, lambda: sample_rows(logits, plain), logits.nbytes)
        yield self._measure("sampling, top-k and top-p", workload, lambda: sample_rows(logits, filtered), logits.nbytes)
        flat, nucleus = 0.8 * logits, rows_drawn(rows, 0, 0.95, self.device)  # some 15,000 candidates of 128,256
        yield self._measure("sampling, top-p, flat", workload, lambda: sample_rows(flat, nucleus), logits.nbytes)
        hostile = rows_drawn(rows, 0, 1.0, self.device)
        hostile.temperature[0], hostile.top_p[0] = 2.0, 0.99  # more candidates than are gathered
        yield self._measure("sampling, one hostile row", workload, lambda: sample_rows(flat, hostile), logits.nbytes)
        moved = 2 * logits.nbytes + 5 * logits.numel()
        penalised = lambda: sample_rows(logits, filtered, penalties)  # noqa: E731
        yield self._measure("sampling, penalties too", workload, penalised, moved)

    def _measure(
        self,
        kernel: str,
        workload: Workload,
        body: Callable[[], object],
        num_bytes: int,
        operations: int = 0,
        turns: int = 1,
    ) -> Measured:
        seconds = best_seconds(body, self.device, turns)
        floor = max(num_bytes / self.peaks.bandwidth, operations / self.peaks.matrix_rate)
        return Measured(kernel, self.name, str(workload), seconds, num_bytes, operations, floor)


def turns(num_bytes: int) -> int:
    """The number of buffers of `num_bytes` to rotate, so that few are cached at their turn; 1 on a CPU."""
    return min(MOST_TURNS, -(-CACHED_BYTES // num_bytes)) if torch.cuda.is_available() else 1


def step_of(workload: Workload, device: torch.device) -> StepInputs:
    """The step of `workload`, its blocks shuffled."""
    width = -(-workload.context // BLOCK_SIZE)
    tables = torch.randperm(workload.sequences * width).view(-1, width).int()
    positions = torch.arange(workload.context - workload.tokens, workload.context)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(workload.sequences + 1, dtype=torch.int32) * workload.tokens
    return StepInputs(
        token_ids=torch.zeros(workload.sequences * workload.tokens, dtype=torch.int64, device=device),
        positions=positions.repeat(workload.sequences).to(device),
        slot_mapping=slots.flatten().to(device),
        query_start=starts.to(device),
        context_lens=torch.full((workload.sequences,), workload.context, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_seqs=workload.sequences,
        max_query_len=workload.tokens,
        max_context_len=workload.context,
    )


def rows_drawn(rows: int, top_k: int, top_p: float, device: torch.device) -> RowSampling:
    """Every row at temperature 0.8, with a seed and a position of its own."""
    every = torch.arange(rows, device=device)

    def filled(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    return RowSampling(filled(0.8), filled(0.0), filled(top_k).int(), filled(top_p), every, every)


def best_seconds(body: Callable[[], object], device: torch.device, turns: int = 1) -> float:
    """Seconds of one call: the best replay of a CUDA graph of several; on a CPU, of a single call."""
    body()
    if device.type == "cpu":
        started = time.perf_counter()
        body()
        return time.perf_counter() - started
    calls = max(REPEATS, turns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            body()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return min(times) / calls


def peaks_of(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Bandwidth of the faster of two copies, and rate of a product, all far larger than the caches, of numbers drawn at
    random: a device may be faster on zeros.
    """
    return Peaks(max(copy_rates(device).values()), matrix_rate(device, dtype))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a matrix product."""
    side = 8192 if device.type == "cuda" else 128
    a = torch.randn((side, side), dtype=dtype, device=device)
    return 2 * side**3 / best_seconds(lambda: a @ a, device)


def copy_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second, read and written, of copies by the driver, which in a graph may be slower, and by a kernel."""
    size = 2 << 30 if device.type == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device).random_().view(torch.int32)
    target = torch.empty_like(source)
    return {
        "driver's": 2 * size / best_seconds(lambda: target.copy_(source), device),
        "kernel's": 2 * size / best_seconds(lambda: torch.bitwise_not(source, out=target), device),
    }


def measure_kernels(device: torch.device, dtype: torch.dtype, peaks: Peaks) -> Iterator[Measured]:
    """Every kernel over every workload: the shapes of real models on a GPU, a small one elsewhere."""
    gpu = device.type == "cuda"
    shapes = {"Llama-3-8B": LLAMA_3_8B, "Qwen3-0.6B": QWEN3_06B} if gpu else {"small": SMALL}
    for name, shape in shapes.items():
        bench = Bench(name, shape, dtype, device, peaks)
        for workload in (*DECODES, *PREFILLS) if gpu else (*SMALL_DECODES, *SMALL_PREFILLS):
            yield from bench.attention(workload)
            yield from bench.rowwise(workload)
            yield from bench.products(workload)
            if workload.tokens == 1:
                yield from bench.sampling(workload)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_grad_enabled(False)
    wrong = disagreements(TritonOps(), torch.float32, device)
    print(f"wrong against the reference: {', '.join(wrong)}" if wrong else "every kernel agrees with the reference")
    peaks = peaks_of(device, dtype)
    print(f"copy {peaks.bandwidth / 1e9:.0f} GB/s, matrix product {peaks.matrix_rate / 1e12:.1f} TFLOP/s")
    print(f"{'kernel':28}{'shape':12}{'workload':18}{'us':>10}{'MB':>9}{'floor us':>10}{'fraction':>9}")
    rows: list[dict[str, object]] = []
    for found in measure_kernels(device, dtype, peaks):
        rows.append(asdict(found) | {"fraction": found.fraction})
        if options.json:  # after each one, in case this is ended
            options.json.write_text(json.dumps({"peaks": asdict(peaks), "kernels": rows, "wrong": wrong}, indent=1))
        name = f"{found.kernel:28}{found.shape:12}{found.workload:18}"
        figures = f"{found.seconds * 1e6:10.1f}{found.num_bytes / 1e6:9.2f}{found.floor * 1e6:10.1f}"
        print(f"{name}{figures}{found.fraction:9.2f}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
