"""The coverage of the promises to admitted requests, and their width: `python -m labs.benchmarks.promises [--trace
FILE]`.

The machine, the traffic and the loads are those of `overload`: Llama-3-8B on an A100 (simulated), requests of four
tenants at 0.9 and 1.4 of capacity, in a burst of 2.5, with deadlines of 0.7, 2 and 8 s beside each other, and three
light tenants beside a flood. A starved machine has half of its speed for some seconds at a time, and then all of it
(means of 4 s, exponential), at unpredictable moments.

A promise is a bound on a first or a last token that nine in ten are meant to keep. Coverage is judged by windows of 100
consecutive promises, by tenant and by quartile of prompts; a request given up before its first token broke its promise.
Told over true is the width of the bounds. It is limited by the answers: an oracle that knows each first token's time
and the length of each step, but only the distribution of all answer lengths, tells the 0.9 quantile of that
distribution. Where answers differ much in length, no bound with this coverage is narrow. With predictable answers,
which differ by 15 % at most, it is.
"""

import sys
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from random import Random
from statistics import mean, median

from admission.step_times.step_time import StepWork
from backend.scheduler.batch import Batch
from labs.benchmarks.counterfactual import ForkingLoop
from labs.benchmarks.overload_loads import (
    BESIDE_2X,
    BURST,
    DEVICE,
    MAX_TOKENS,
    MIXED,
    OVERLOAD,
    UNDERLOAD,
    Load,
    Traffic,
)
from labs.benchmarks.overload_runs import WINDOW_PROMISES, KeptPromise, Run, simulate
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.simulation.arrival import Arrival

OURS = "order=fair,overload=deadline"
STARVED_SPEED, STARVED_SECONDS = 0.5, 4.0
WARM_UP_PROMISES = 50  # promises, before those of a starved machine are judged
CONFIDENCE = 0.9
WITHIN_ORACLE = 1.15  # of the oracle's bounds
LOADS = (UNDERLOAD, OVERLOAD, BURST, MIXED, BESIDE_2X)
STARVED = (UNDERLOAD, OVERLOAD, BURST)


class Starvation:
    """The speed of a machine that others use too, as a share of its own."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self._random = Random(seed)
        self._switches = [0.0]  # to and from its own speed

    def seconds(self, work: StepWork) -> float:
        """The duration of a step that begins now."""
        while self._switches[-1] <= self.now:
            self._switches.append(self._switches[-1] + self._random.expovariate(1 / STARVED_SECONDS))
        is_slow = bisect_right(self._switches, self.now) % 2 == 0
        return DEVICE.seconds(work) / (STARVED_SPEED if is_slow else 1.0)

    def loop(self) -> type[ForkingLoop]:
        """Returns a loop that says when steps begin."""
        starvation = self

        class StarvedLoop(ForkingLoop):
            def _submit(self, batch: Batch, now: float) -> None:
                starvation.now = max(self._done_at, now)
                super()._submit(batch, now)

        return StarvedLoop


class Promised:
    """The promises of one run, in the order in which they were given."""

    def __init__(self, run: Run) -> None:
        self.run, self.promises = run, run.promises
        self.completed = [promise for promise in self.promises if promise.last]

    @property
    def worst_quartile(self) -> float:
        """The share of promises of first tokens that held in the quartile of prompts in which fewest did."""
        prompts = sorted(promise.prompt for promise in self.promises)
        cuts = [prompts[len(prompts) * n // 4] for n in (1, 2, 3)]
        held: list[list[bool]] = [[] for _ in range(4)]
        for promise in self.promises:
            held[bisect_right(cuts, promise.prompt)].append(_holds(promise))
        return min(mean(each) for each in held if each)

    @property
    def once_learned(self) -> float:
        held = [_holds(promise) for promise in self.promises[WARM_UP_PROMISES:]]
        return mean(held) if held else 1.0

    @property
    def first_told_over_true(self) -> float:
        return median([promise.told_first / promise.first for promise in self.promises if promise.first])

    @property
    def told_over_true(self) -> float:
        return median([promise.told_last / (promise.last or 1.0) for promise in self.completed])

    @cached_property
    def oracle_over_true(self) -> float:
        """The oracle's told over true: it knows the distribution of lengths, and all else of each request."""
        lengths = sorted(arrival.output_tokens for arrival in self.run.arrivals)
        most = quantile(lengths, CONFIDENCE)
        told = []
        for promise in self.completed:
            if promise.first is not None and promise.last is not None and promise.length > 1:
                a_token = (promise.last - promise.first) / (promise.length - 1)
                told.append((promise.first + (most - 1) * a_token) / promise.last)
        return median(told)


FIGURES: Mapping[str, Callable[[Promised], float]] = {
    "covered windows": lambda promised: promised.run.covered(),
    "coverage": lambda promised: promised.run.coverage,
    "worst tenant": lambda promised: promised.run.worst_covered_tenant,
    "worst quartile of prompts": lambda promised: promised.worst_quartile,
    "after 50": lambda promised: promised.once_learned,
    "told / true": lambda promised: promised.first_told_over_true,
    "of completions": lambda promised: promised.run.completion_coverage,
    "completions told / true": lambda promised: promised.told_over_true,
    "the oracle's": lambda promised: promised.oracle_over_true,
    "good": lambda promised: promised.run.good,
}


def _holds(promise: KeptPromise) -> bool:
    return promise.first is not None and promise.first <= promise.told_first


def predictable() -> Traffic:
    """Conversations whose answers have 170 to 230 tokens, unknown to the scheduler."""
    random = Random(0)
    trace = [one._replace(output_tokens=random.randint(170, 230)) for one in Traffic.conversations().trace]
    return Traffic("predictable answers", trace, MAX_TOKENS)


def promised(arrivals: list[Arrival], settings: str, starvation: Starvation | None = None) -> Promised:
    policy = OURS + settings
    if starvation is None:
        return Promised(simulate(policy, arrivals))
    device = replace(DEVICE, seconds=starvation.seconds)
    return Promised(simulate(policy, arrivals, make_loop=starvation.loop(), device=device))


def row(name: str, runs: Sequence[Promised]) -> dict[str, object]:
    return {"load": name} | {what: Spread.of([get(run) for run in runs]) for what, get in FIGURES.items()}


def show(traffic: Traffic, loads: Sequence[Load], seeds: Sequence[int], options: Namespace, report: Report) -> None:
    settings = f",{options.settings}" if options.settings else ""
    rows = []
    for load in loads:
        runs = [promised(_arrivals(load, traffic, seed, options), settings) for seed in seeds]
        rows.append(row(load.name, runs))
        _judge(report, f"{traffic.name}, {load.name}", runs)
    report.add_table(f"{traffic.name}: promises", rows)


def _judge(report: Report, name: str, runs: Sequence[Promised]) -> None:
    report.at_least(f"{name}: windows of {WINDOW_PROMISES} covered", mean(one.run.covered() for one in runs), 0.95)
    report.at_least(f"{name}: the worst tenant in any run", min(one.run.worst_covered_tenant for one in runs), 0.82)
    told, oracle = mean(one.told_over_true for one in runs), mean(one.oracle_over_true for one in runs)
    what = f"{name}: completions told / true, where an oracle of lengths tells {oracle:.2f}"
    report.at_most(what, told, max(1.5, WITHIN_ORACLE * oracle))
    report.at_least(f"{name}: completions covered", mean(one.run.completion_coverage for one in runs), 0.87)


def show_starved(traffic: Traffic, seeds: Sequence[int], options: Namespace, report: Report) -> None:
    settings = f",{options.settings}" if options.settings else ""
    rows = []
    for load in STARVED:
        runs = [promised(_arrivals(load, traffic, seed, options), settings, Starvation(seed)) for seed in seeds]
        rows.append(row(load.name, runs))
        worst = min(one.once_learned for one in runs)
        report.at_least(
            f"{traffic.name}, {load.name}, starved: coverage after {WARM_UP_PROMISES} in any run", worst, 0.85
        )
    report.add_table(f"{traffic.name}, on a starved machine: promises", rows)


def _arrivals(load: Load, traffic: Traffic, seed: int, options: Namespace) -> list[Arrival]:
    return load.shortened(0.2 if options.quick else 1.0).arrivals(traffic, seed)


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--trace", type=Path, help="instead of drawn lengths")
    parser.add_argument("--seeds-from", type=int, default=101, metavar="N", help="the first seed; 1 is for tuning")
    parser.add_argument("--settings", default="", help="of the core, such as confidence=0.9")
    options = parser.parse_args(arguments)
    report = Report("promises", options.quick)
    seeds = range(options.seeds_from, options.seeds_from + (1 if options.quick else options.runs))
    report.notes.append(f"seeds {seeds.start} to {seeds.stop - 1}; settings: {options.settings or 'the defaults'}")
    drawn = [Traffic.recorded(options.trace)] if options.trace else [Traffic.conversations(), Traffic.code()]
    for traffic in drawn:
        show(traffic, LOADS, seeds, options, report)
        show_starved(traffic, seeds, options, report)
    show(predictable(), (UNDERLOAD, OVERLOAD), seeds, options, report)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
