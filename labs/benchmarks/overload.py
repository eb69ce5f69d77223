"""More work than the machine can do, under each policy: `python -m labs.benchmarks.overload [--trace FILE] [--runs 3]`.

Llama-3-8B on an A100 (simulated, published step times), 512 tokens a step, 192 sequences. A request is good with its
first token by its deadline, 2 s unless a table says otherwise, and then 0.1 s a token; those refused or given up stay
in the denominator. Capacity is what the machine completes of requests that are all there from the start. Requests come
from four equal tenants, Poisson, and in the burst for 60 s 2.5 times as many as otherwise, which is 0.8 of capacity.

Lengths are drawn from quantiles of Azure's conversations and of its requests for code (`overload_loads`), or
from a `--trace` that `sluice simulate` reads, which is also replayed with its times. Three light tenants ask for 0.15
of capacity each beside a flood of 2 and of 4; where it is of 4 their requests are short and have no deadlines, so that
none is refused.

Targets are judged by means over the seeds, none of which anything was tuned with: `--seeds-from 1` is for
tuning, with `--settings` for what is tried and `--only` for some of the scenes. What was admitted and missed, and what
was wrongly refused, are shares of the offered requests. A refusal was wrong when the same world with the request let
in, its deadline kept, has more good requests among those of the next 30 s; one in `REFUSALS_PER_REPLAY` is replayed.
Coverage is that of consecutive promises of first tokens: the share of windows of 100 in which 0.82 to 0.97 of them
held.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from labs.benchmarks.overload_loads import (
    ALONE,
    BESIDE_2X,
    BESIDE_4X,
    BESIDE_PATIENT,
    BURST,
    LIGHT,
    MIXED,
    OVERLOAD,
    RECORDED,
    UNDERLOAD,
    Load,
    Traffic,
    everyone,
)
from labs.benchmarks.overload_runs import EXPIRED, Run, simulate
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.simulation.clients import BudgetedRetries, Clients, ImmediateRetries

OURS = "order=fair,overload=deadline"
PLAIN = {
    "FCFS, unbounded": "order=fcfs,overload=unbounded",
    "FCFS, bounded queue of 64": "order=fcfs,overload=bounded,max_waiting=64",
    "CoDel + adaptive LIFO": "order=adaptive_lifo,overload=controlled_delay",
    "FCFS with our deadlines": "order=fcfs,overload=deadline",
    "earliest deadline with ours": "order=earliest_deadline,overload=deadline",
    "fair with deadlines": OURS,
}
REFUSALS_PER_REPLAY = 4  # every n-th refusal is replayed as an admission
WORST_TENANT, WORST_WINDOW = 0.95, 0.85  # of the mean; where only chance made them differ, 0.98 and 0.96
ALONE_P99, BESIDE_P99 = 0.27, 0.6  # seconds; what light tenants may wait beside a flood grows with what they wait alone

FIGURES: dict[str, Callable[[Run], float]] = {
    "good": lambda run: run.good,
    "good tokens": lambda run: run.good_tokens,
    "refused": lambda run: run.refused,
    "admitted, missed": lambda run: run.missed,
}
FRONTIER: dict[str, Callable[[Run], float]] = FIGURES | {
    "longest quartile": lambda run: run.by_length[-1],
    "of the shortest's": lambda run: run.longest_over_shortest,
    "worst tenant": lambda run: run.worst_tenant,
    "worst 30 s": lambda run: run.worst_window,
    "wrongly refused": lambda run: run.wrongly_refused,
    "refused though good": lambda run: run.refused_though_good,
    "good, had one been let in": lambda run: run.regrets.mean_gain,
}
PROMISES: dict[str, Callable[[Run], float]] = {
    "covered windows": lambda run: run.covered(),
    "coverage": lambda run: run.coverage,
    "worst tenant": lambda run: run.worst_covered_tenant,
    "of completions": lambda run: run.completion_coverage,
    "completions told / true": lambda run: run.told_over_true,
}


class Bench:
    """The same arrivals for every policy."""

    def __init__(self, traffic: Traffic, seeds: Sequence[int], settings: str = "", shorter: float = 1.0) -> None:
        self.traffic, self.seeds = traffic, seeds
        self._settings, self._shorter = f",{settings}" if settings else "", shorter

    def runs(
        self, load: Load, policy: str = OURS, clients: Callable[[int], Clients] | None = None, look_into: int = 0
    ) -> list[Run]:
        """Returns one run for each seed."""
        load, made = load.shortened(self._shorter), []
        settings = self._settings if policy.startswith(OURS) else ""
        for seed in self.seeds:
            arrivals = load.arrivals(self.traffic, seed)
            made.append(simulate(policy + settings, arrivals, clients(seed) if clients else None, look_into))
        return made


Row = dict[str, Any]


def row(name: str, runs: Sequence[Run], figures: Mapping[str, Callable[[Run], float]], head: str = "policy") -> Row:
    return {head: name} | {what: Spread.of([get(run) for run in runs]) for what, get in figures.items()}


def mean_of(runs: Sequence[Run], get: Callable[[Run], float]) -> float:
    return mean(get(run) for run in runs)


# scenes


def compare_equal(bench: Bench, report: Report) -> None:
    """Shows equal tenants at 1.4 times capacity, and at the times that were recorded."""
    name = bench.traffic.name
    for load in (OVERLOAD, *((RECORDED,) if bench.traffic.is_recorded else ())):
        runs = bench.runs(load, look_into=REFUSALS_PER_REPLAY)
        report.add_table(f"{name}, {load.name}", [row("fair with deadlines", runs, FRONTIER)])
        report.add_table(f"{name}, {load.name}: promises", [row("fair with deadlines", runs, PROMISES)])
        if load is OVERLOAD:
            _judge_good(report, bench.traffic, runs)
            _judge_promises(report, f"{name} at {load.name}", runs)
        _judge_worst(report, f"{name} at {load.name}", runs)


def _judge_good(report: Report, traffic: Traffic, runs: Sequence[Run]) -> None:
    name = traffic.name
    report.at_least(f"{name} at 1.4x: good", mean_of(runs, lambda run: run.good), 0.87)
    good_tokens = mean_of(runs, lambda run: run.good_tokens)
    report.at_least(f"{name} at 1.4x: good tokens", good_tokens, 0.74 if traffic.is_code else 0.77)
    longest = mean_of(runs, lambda run: run.longest_over_shortest)
    report.at_least(f"{name} at 1.4x: longest quartile, of the shortest's share", longest, 0.68)


def _judge_worst(report: Report, name: str, runs: Sequence[Run]) -> None:
    report.at_most(f"{name}: admitted, missed", mean_of(runs, lambda run: run.missed), 0.02)
    report.at_most(f"{name}: wrongly refused", mean_of(runs, lambda run: run.wrongly_refused), 0.02)
    tenant = mean_of(runs, lambda run: run.worst_tenant / run.good)
    report.at_least(f"{name}: the worst of equal tenants, of the mean", tenant, WORST_TENANT)
    window = mean_of(runs, lambda run: run.worst_window / run.good)
    report.at_least(f"{name}: the worst 30 s, of the mean", window, WORST_WINDOW)


def _judge_promises(report: Report, name: str, runs: Sequence[Run]) -> None:
    report.at_least(f"{name}: windows of promises covered", mean_of(runs, lambda run: run.covered()), 0.95)
    worst = min(run.worst_covered_tenant for run in runs)
    report.at_least(f"{name}: coverage of the worst tenant in any run", worst, 0.82)
    told = mean_of(runs, lambda run: run.told_over_true)
    report.at_most(f"{name}: completions, told over true, median", told, 1.5)


def compare_deadlines(bench: Bench, report: Report) -> None:
    """Shows requests of 0.7, 2 and 8 s beside each other, under orders that know deadlines and some that do not."""
    by_deadline: dict[str, Callable[[Run], float]] = {
        "good of 0.7 s": lambda run: run.good_within(0.7),
        "of 2 s": lambda run: run.good_within(2.0),
        "of 8 s": lambda run: run.good_within(8.0),
    }
    runs = {name: bench.runs(MIXED, policy) for name, policy in PLAIN.items() if "overload=deadline" in policy}
    rows = [row(name, each, FIGURES | by_deadline) for name, each in runs.items()]
    report.add_table(f"{bench.traffic.name}, {MIXED.name}", rows)
    ours = runs["fair with deadlines"]
    report.add_table(f"{bench.traffic.name}, {MIXED.name}: promises", [row("fair with deadlines", ours, PROMISES)])
    name = f"{bench.traffic.name}, {MIXED.name}"
    report.at_least(f"{name}: good", mean_of(ours, lambda run: run.good), 0.86)
    report.at_least(f"{name}: good of 0.7 s", mean_of(ours, by_deadline["good of 0.7 s"]), 0.66)


def compare_neighbours(bench: Bench, report: Report) -> None:
    """Shows light tenants beside a flood, each of them well within its share."""
    name = bench.traffic.name
    lights: dict[str, Callable[[Run], float]] = {
        "light good": lambda run: run.good_of(LIGHT),
        "flood good": lambda run: run.good_of(("flood",)),
    }
    policies = {"fair with deadlines": OURS, "FCFS with our deadlines": PLAIN["FCFS with our deadlines"]}
    runs = {name: bench.runs(BESIDE_2X, policy) for name, policy in policies.items()}
    report.add_table(f"{name}, {BESIDE_2X.name}", [row(each, runs[each], lights | FIGURES) for each in runs])
    ours = runs["fair with deadlines"]
    report.at_least(f"{name}, {BESIDE_2X.name}: light good", mean_of(ours, lights["light good"]), 0.97)
    least = 0.66 if bench.traffic.is_code else 0.62
    report.at_least(f"{name}, {BESIDE_2X.name}: all good", mean_of(ours, lambda run: run.good), least)
    report.at_most(f"{name}, {BESIDE_2X.name}: admitted, missed", mean_of(ours, lambda run: run.missed), 0.02)
    _compare_patient(bench, report)


def _compare_patient(bench: Bench, report: Report) -> None:
    """Shows the waits of light tenants without refusals."""
    runs = {load.name: bench.runs(load) for load in (ALONE, BESIDE_4X, BESIDE_PATIENT)}
    p99s: dict[str, Callable[[Run], float]] = {"p99 of first tokens, s": lambda run: run.p99_of(LIGHT)}
    rows = [row(name, each, p99s, "light tenants") for name, each in runs.items()]
    report.add_table(f"{bench.traffic.name}: light tenants with short requests", rows)
    alone = mean_of(runs[ALONE.name], lambda run: run.p99_of(LIGHT))
    for load in (BESIDE_4X, BESIDE_PATIENT):
        share = mean_of(runs[load.name], lambda run: run.p99_of(LIGHT)) / alone
        what = f"{bench.traffic.name}: p99 of light first tokens {load.name}, times that alone"
        report.at_most(what, share, BESIDE_P99 / ALONE_P99)


def compare_burst(bench: Bench, report: Report) -> None:
    runs, name = bench.runs(BURST), f"{bench.traffic.name}, {BURST.name}"
    recovery: dict[str, Callable[[Run], float]] = {"seconds to recover": lambda run: run.recovery}
    report.add_table(name, [row("fair with deadlines", runs, FIGURES | PROMISES | recovery)])
    report.at_least(f"{name}: good", mean_of(runs, lambda run: run.good), 0.94)
    report.at_most(f"{name}: seconds to recover", median(run.recovery for run in runs), 10)
    _judge_promises(report, name, runs)


def compare_plain(bench: Bench, report: Report) -> None:
    """Shows the plain alternatives beside ours, and what twice the load costs."""
    lengths: dict[str, Callable[[Run], float]] = {
        "given up": lambda run: run.share(EXPIRED),
        "of the shortest's": lambda run: run.longest_over_shortest,
    }
    for load in (UNDERLOAD, OVERLOAD, BURST):
        runs = {name: bench.runs(load, policy) for name, policy in PLAIN.items()}
        rows = [row(name, each, FIGURES | lengths) for name, each in runs.items()]
        report.add_table(f"{bench.traffic.name}, {load.name}", rows)
        if load is UNDERLOAD:
            good = mean_of(runs["fair with deadlines"], lambda run: run.good)
            report.at_least(f"{bench.traffic.name}, {load.name}: good", good, 0.98)
    loads = {1.0: everyone("1x", 1.0), 2.0: everyone("2x", 2.0)}
    rates = [factor * mean_of(bench.runs(load), lambda run: run.good) for factor, load in loads.items()]
    report.at_least(f"{bench.traffic.name}: goodput at 2x over goodput at 1x", rates[1] / rates[0], 0.95)


def compare_clients(bench: Bench, report: Report) -> None:
    figures: dict[str, Callable[[Run], float]] = {
        "attempts a request": lambda run: run.attempts,
        "good": lambda run: run.good,
    }
    runs = {
        "patient": bench.runs(OVERLOAD, clients=BudgetedRetries),
        "at once": bench.runs(OVERLOAD, clients=lambda _: ImmediateRetries()),
    }
    rows = [row(name, each, figures, "retries") for name, each in runs.items()]
    report.add_table(f"{bench.traffic.name}, {OVERLOAD.name}: clients that retry", rows)
    attempts = mean_of(runs["patient"], lambda run: run.attempts)
    report.at_most("attempts a request with well-behaved clients", attempts, 1.1)


SCENES: dict[str, Callable[[Bench, Report], None]] = {
    "equal": compare_equal,
    "mixed": compare_deadlines,
    "light": compare_neighbours,
    "burst": compare_burst,
    "plain": compare_plain,
    "clients": compare_clients,
}
ON_ONE = ("plain", "clients")  # of the kinds of traffic, the first


def _parser() -> ArgumentParser:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--trace", type=Path, help="instead of drawn lengths")
    parser.add_argument("--seeds-from", type=int, default=101, metavar="N", help="the first seed")
    parser.add_argument("--settings", default="", help="of the core, for our policy, such as confidence=0.8")
    parser.add_argument("--only", default=",".join(SCENES), help=f"some of {','.join(SCENES)}")
    return parser


def _traffic(options: Namespace) -> list[Traffic]:
    return [Traffic.recorded(options.trace)] if options.trace else [Traffic.conversations(), Traffic.code()]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - SCENES.keys():
        parser.error(f"--only {','.join(sorted(unknown))}: must be some of {','.join(SCENES)}")
    report = Report("overload", options.quick)
    seeds = range(options.seeds_from, options.seeds_from + (1 if options.quick else options.runs))
    report.notes.append(f"seeds {seeds.start} to {seeds.stop - 1}; settings: {options.settings or 'the defaults'}")
    for number, traffic in enumerate(_traffic(options)):
        bench = Bench(traffic, seeds, options.settings, shorter=0.2 if options.quick else 1.0)
        report.notes.append(f"{traffic.name}: capacity {traffic.capacity:.2f} requests a second")
        for name, scene in SCENES.items():
            if name in wanted and not (number and name in ON_ONE):
                scene(bench, report)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
