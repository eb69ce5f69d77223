"""The price of a step with a number of rows that no step had before: `python -m labs.benchmarks.row_counts`.

oneDNN compiles a kernel for each number of rows. Steps of random numbers of rows run twice, over weights packed for it
and multiplied as they come, over the same in tiles (`backend.kernels.linear`), and over our own products, one thread. A
step's excess is what its first run took beyond its second, in CPU time of the thread: others on the machine count for
little. float32.
"""

import sys
import time
from random import Random

import torch

from backend.kernels.cpu import select_ops
from backend.kernels.linear import packed_linear
from backend.kernels.ops import StepInputs
from backend.kernels.torch_ops import TorchOps
from backend.model.decoder import Decoder
from backend.model.known_shapes import LLAMA_32M
from backend.model.weights import random_weights
from backend.paged_kv.kv_cache import KVCache
from labs.benchmarks.kernels_cpu import BLOCK_SIZE, CPU, step_of
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser

MOST_ROWS = 64


class AnyHeight(TorchOps):
    """oneDNN is asked for each number of rows as it comes."""

    linear = staticmethod(packed_linear)


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--steps", type=int, default=60, help="random numbers of rows in a run")
    options = parser.parse_args(arguments)
    report = Report("row_counts", options.quick)
    runs, steps = (1, 4) if options.quick else (options.runs, options.steps)
    torch.set_num_threads(1)
    decoders = {
        "oneDNN, any number of rows": AnyHeight,
        "oneDNN, tiles": TorchOps,
        "compiled kernels": lambda: select_ops(CPU, torch.float32, "native"),
    }
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in decoders}
    for run in range(runs):
        made = {
            name: Decoder(LLAMA_32M, random_weights(LLAMA_32M, torch.float32), ops(), MOST_ROWS)
            for name, ops in decoders.items()
        }
        found = _excesses(made, Random(run), steps)
        for name, pairs in found.items():
            shares[name].append(_figures(pairs))
    report.add_table(
        f"steps of 1 to {MOST_ROWS} rows, {steps} a run, median (extremes) of {runs} runs",
        [{"products": name, **{key: Spread.of([run[key] for run in own]) for key in own[0]}}
         for name, own in shares.items()],
    )  # fmt: skip
    for name in ("oneDNN, tiles", "compiled kernels"):
        usual = Spread.of([run["excess p50, share"] for run in shares[name]]).median
        report.at_most(f"{name}: excess of the first step with a number of rows, share of it", usual, 0.01)
    return report.finish(options.results)


def _excesses(decoders: dict[str, Decoder], rng: Random, steps: int) -> dict[str, list[tuple[float, float]]]:
    """The seconds of the first and of the second run of each step, by decoder; these take turns."""
    kv = KVCache(LLAMA_32M, -(-MOST_ROWS // BLOCK_SIZE), BLOCK_SIZE, torch.float32, CPU)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}
    for decoder in decoders.values():  # memory and code are there; the row counts below are others
        for rows in (MOST_ROWS, 1):
            _seconds(decoder, step_of(1, rows, rows), kv)
    for rows in rng.sample(range(2, MOST_ROWS), steps):
        step = step_of(1, rows, rows)
        for name, decoder in decoders.items():
            found[name].append((_seconds(decoder, step, kv), _seconds(decoder, step, kv)))
    return found


def _seconds(decoder: Decoder, step: StepInputs, kv: KVCache) -> float:
    began = time.thread_time()
    decoder.logits(decoder.forward(step, kv)[-1:])
    return time.thread_time() - began


def _figures(pairs: list[tuple[float, float]]) -> dict[str, float]:
    milliseconds = sorted(first * 1e3 for first, _ in pairs)
    excess = sorted((first - second) * 1e3 for first, second in pairs)
    shares = sorted(first / second - 1 for first, second in pairs)
    return {
        "p50 ms": quantile(milliseconds, 0.5),
        "p99 ms": quantile(milliseconds, 0.99),
        "excess p50 ms": quantile(excess, 0.5),
        "excess p99 ms": quantile(excess, 0.99),
        "excess p50, share": quantile(shares, 0.5),
        "excess p99, share": quantile(shares, 0.99),
    }


if __name__ == "__main__":
    sys.exit(main())
