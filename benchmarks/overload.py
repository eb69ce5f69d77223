"""More work than the machine can do, each policy for it: python -m benchmarks.overload [--trace FILE] [--runs 5]

Llama-3-8B on an A100 (simulated, published step times), 512 tokens a step, 192 sequences, four tenants, all Poisson.
Requests are good with a first token in 2 s and then 0.1 s a token; those refused or given up stay in the denominator.
Capacity is what the machine completes of requests that are all there from the start. The burst is 60 s of 2.5 times as
many requests, in ten minutes at 0.8 of capacity. Medians over seeds, with the extremes.

Without `--trace` (an Azure LLM inference trace, CSV) prompts and outputs are drawn independently from quantiles of its
conversations of 2023 (`PROMPTS`, `OUTPUTS`), log-linear in between. A log-normal fit would miss that half of the
prompts have between 400 and 1,200 tokens. Everyone declares 1,024 max_tokens.
"""

import gc
import sys
from argparse import ArgumentParser
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from admission.controller import Controller
from admission.simulation.arrival import Arrival
from admission.simulation.clients import BudgetedRetries, Clients, ImmediateRetries
from admission.simulation.device import DEVICES
from admission.simulation.policy import parse_simulated_policy
from admission.simulation.recorder import AttemptOutcome, Objective
from admission.simulation.study import capacity
from admission.simulation.traces import read_trace
from admission.simulation.workload import Workload
from benchmarks.counterfactual import ForkingLoop, Regrets, WatchingRecorder
from benchmarks.report import Report, Spread, scenario_parser

DEVICE = DEVICES["llama3-8b-a100"]
ENGINE = "max_num_batched_tokens=512,max_num_seqs=192,prefill_chunk=512"
DEADLINE = "deadline + conformal"
POLICIES = {
    "FCFS, unbounded": "order=fcfs,overload=unbounded",
    "FCFS, bounded queue of 64": "order=fcfs,overload=bounded,max_waiting=64",
    "CoDel + adaptive LIFO": "order=adaptive_lifo,overload=controlled_delay",
    DEADLINE: "order=fair,overload=deadline",
}
TENANTS = 4
MAX_TOKENS = 1024
SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999, 1)
PROMPTS = (2, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 1877, 2735, 4083, 4098, 4142, 6212, 14050)  # tokens
OUTPUTS = (7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 411, 424, 451, 540, 601, 954, 1000)
STEADY_SECONDS = 300.0
BURST_SECONDS, BURST_BASE, BURST_FACTOR = 600.0, 0.8, 2.5
BURST_START, BURST_END = 240.0, 300.0
WARM_UP = 30.0
WINDOW = 10.0  # over which goodput is told after a burst
LOOKED_INTO = 4  # every such refusal is replayed as an admission
OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True)
class Load:
    """Times capacity, for so many seconds; with the burst or without."""

    name: str
    factor: float
    seconds: float
    burst: bool = False

    def rate(self, time: float) -> float:
        return self.factor * (BURST_FACTOR if self.burst and BURST_START <= time < BURST_END else 1.0)

    def arrivals(self, trace: Sequence[Arrival], capacity: float, seed: int) -> list[Arrival]:
        """In order of time."""
        random, time = Random(seed), 0.0
        made: list[Arrival] = []
        while True:
            time += random.expovariate(capacity * self.rate(time))
            if time >= self.seconds:
                return made
            tenant = f"tenant-{random.randrange(TENANTS)}"
            made.append(
                random.choice(trace)._replace(
                    time=time, tenant=tenant, max_tokens=MAX_TOKENS, deadline=OBJECTIVE.first_token
                )
            )


BURST = Load("2.5x burst", BURST_BASE, BURST_SECONDS, burst=True)
LOADS = (Load("0.9x", 0.9, STEADY_SECONDS), Load("1.4x", 1.4, STEADY_SECONDS), BURST)


@dataclass
class Run:
    """One policy through one list of arrivals; each request has one outcome, that of its last attempt."""

    arrivals: list[Arrival]
    outcomes: list[tuple[Arrival, AttemptOutcome]]
    core: Controller
    regrets: Regrets

    def share(self, *outcomes: AttemptOutcome) -> float:
        return sum(outcome in outcomes for _, outcome in self.outcomes) / len(self.arrivals)

    @property
    def good(self) -> float:
        return self.share(AttemptOutcome.GOOD)

    @property
    def turned_away(self) -> float:
        return self.share(AttemptOutcome.REFUSED, AttemptOutcome.EXPIRED)

    @property
    def good_tokens(self) -> float:
        offered = sum(a.prompt_tokens + a.output_tokens for a in self.arrivals)
        return (
            sum(a.prompt_tokens + a.output_tokens for a, outcome in self.outcomes if outcome is AttemptOutcome.GOOD)
            / offered
        )

    @property
    def coverage(self) -> float:
        return self.core.control.calibration.coverage

    @property
    def completion_coverage(self) -> float:
        return self.core.control.calibration.completion_coverage

    @property
    def regretted(self) -> float:
        """Share of the offered requests that were refused and would have been good."""
        return self.regrets.share * self.share(AttemptOutcome.REFUSED)

    @cached_property
    def by_length(self) -> list[float]:
        """Share of each prompt-length quartile that was refused or given up, over that of all."""
        lengths = sorted(a.prompt_tokens for a in self.arrivals)
        cuts = [lengths[len(lengths) * n // 4] for n in (1, 2, 3)]
        offered, away = [0] * 4, [0] * 4
        for arrival, outcome in self.outcomes:
            quartile = sum(arrival.prompt_tokens > cut for cut in cuts)
            offered[quartile] += 1
            away[quartile] += outcome in (AttemptOutcome.REFUSED, AttemptOutcome.EXPIRED)
        mean = self.turned_away or 1.0
        return [refused / max(1, count) / mean for refused, count in zip(away, offered, strict=True)]

    def good_between(self, start: float, end: float) -> float:
        """Share of the requests that arrived then."""
        outcomes = [outcome for arrival, outcome in self.outcomes if start <= arrival.time < end]
        return outcomes.count(AttemptOutcome.GOOD) / max(1, len(outcomes))

    @property
    def recovery(self) -> float:
        """Seconds after the burst until those who arrive in a window fare 95 % as well as before it."""
        before = self.good_between(WARM_UP, BURST_START)
        time = BURST_END
        while self.good_between(time, time + WINDOW) < 0.95 * before and time < BURST_SECONDS:
            time += 1
        return time - BURST_END

    @property
    def attempts(self) -> float:
        """For each request."""
        return 1.0 + sum(arrival.attempt for arrival, _ in self.outcomes) / len(self.arrivals)


def simulate(policy: str, arrivals: list[Arrival], clients: Clients | None = None, look_into: int = 0) -> Run:
    """`look_into`: every such refusal is replayed as an admission; 0: none."""
    simulated = parse_simulated_policy(f"{policy},{ENGINE}", DEVICE)
    recorder = WatchingRecorder(DEVICE, OBJECTIVE, {})
    core, regrets = simulated.make_core(), Regrets()
    loop = ForkingLoop(core, DEVICE, recorder, simulated.engine.max_model_len, clients)
    loop.every, loop.regrets = look_into, regrets
    gc.disable()
    try:
        loop.run(arrivals)
    finally:
        gc.enable()
    return Run(arrivals, list(_last_attempts(recorder.outcomes)), core, regrets)


def _last_attempts(outcomes: Sequence[tuple[Arrival, AttemptOutcome]]) -> list[tuple[Arrival, AttemptOutcome]]:
    """A request is known by its session over all its attempts."""
    last: dict[int, tuple[Arrival, AttemptOutcome]] = {}
    for arrival, outcome in outcomes:
        if arrival.session not in last or arrival.attempt > last[arrival.session][0].attempt:
            last[arrival.session] = arrival, outcome
    return list(last.values())


def drawn_trace(seed: int = 0, count: int = 20_000) -> list[Arrival]:
    """Lengths by their quantiles; see the module's docstring."""
    random = Random(seed)

    def length(quantiles: Sequence[int]) -> int:
        share = random.random()
        upper = bisect_right(SHARES, share)
        (s0, s1), (low, high) = SHARES[upper - 1 : upper + 1], quantiles[upper - 1 : upper + 1]
        return round(low * (high / low) ** ((share - s0) / (s1 - s0)))

    return [Arrival(0.0, length(PROMPTS), length(OUTPUTS)) for _ in range(count)]


class Bench:
    """The same arrivals for every policy."""

    def __init__(self, trace: Sequence[Arrival], seeds: int, shorter: float = 1.0) -> None:
        self.trace, self.seeds, self.shorter = trace, range(1, seeds + 1), shorter
        at_once = Workload(tuple(trace), tenants=str(TENANTS), max_tokens=MAX_TOKENS)
        self.capacity = capacity(parse_simulated_policy(f"order=fair,{ENGINE}", DEVICE), at_once, DEVICE)

    def runs(
        self, policy: str, load: Load, clients: Callable[[int], Clients] | None = None, look_into: int = 0
    ) -> list[Run]:
        """One for each seed."""
        load = load if load.burst else Load(load.name, load.factor, load.seconds * self.shorter)
        made = []
        for seed in self.seeds:
            arrivals = load.arrivals(self.trace, self.capacity, seed)
            arrivals = [arrival._replace(session=number) for number, arrival in enumerate(arrivals)]
            made.append(simulate(policy, arrivals, clients(seed) if clients else None, look_into))
        return made


def _spread(runs: Sequence[Run], get: Callable[[Run], float]) -> Spread:
    return Spread.of([get(run) for run in runs])


def compare_policies(bench: Bench, report: Report) -> dict[str, list[Run]]:
    """The table of policies by load; returns the default policy's runs by load."""
    ours: dict[str, list[Run]] = {}
    for load in LOADS:
        rows: list[dict[str, Any]] = []
        for name, policy in POLICIES.items():
            look = LOOKED_INTO if name == DEADLINE and load.factor > 1 else 0
            runs = bench.runs(policy, load, look_into=look)
            rows.append(
                {
                    "policy": name,
                    "good": _spread(runs, lambda run: run.good),
                    "good tokens": _spread(runs, lambda run: run.good_tokens),
                    "refused": _spread(runs, lambda run: run.share(AttemptOutcome.REFUSED)),
                    "given up": _spread(runs, lambda run: run.share(AttemptOutcome.EXPIRED)),
                    "by length": " ".join(f"{median(q):.2f}" for q in zip(*(r.by_length for r in runs), strict=True)),
                }
            )
            if name == DEADLINE:
                ours[load.name] = runs
        report.add_table(f"{load.name}: shares of requests; refusals by prompt-length quartile, over their mean", rows)
    return ours


def judge(report: Report, ours: dict[str, list[Run]]) -> None:
    for load, least in (("0.9x", 0.98), ("1.4x", 0.82), ("2.5x burst", 0.91)):
        report.at_least(f"good at {load}", median(run.good for run in ours[load]), least)
    for load in ("1.4x", "2.5x burst"):
        coverage = median(run.coverage for run in ours[load])
        report.at_most(f"coverage of the 90 % estimates at {load}, off by", abs(coverage - 0.9), 0.02)
        coverage = median(run.completion_coverage for run in ours[load])
        report.at_most(f"the same of last tokens at {load}, off by", abs(coverage - 0.9), 0.02)
        worst = max(median(shares) for shares in zip(*(run.by_length for run in ours[load]), strict=True))
        report.at_most(f"worst quartile's refusals over the mean at {load}", worst, 2.0)
    regretted = median(run.regretted for run in ours["1.4x"])
    report.at_most("refused, but would have been good, at 1.4x", regretted, 0.03)
    report.at_most("seconds to recover from the burst", median(run.recovery for run in ours["2.5x burst"]), 10)


def compare_clients(bench: Bench, report: Report) -> None:
    load = LOADS[1]
    rows, amplification = [], {}
    for name, clients in (("patient", BudgetedRetries), ("at once", lambda _: ImmediateRetries())):
        runs = bench.runs(POLICIES[DEADLINE], load, clients=clients)
        amplification[name] = median(run.attempts for run in runs)
        rows.append(
            {
                "retries": name,
                "attempts a request": _spread(runs, lambda run: run.attempts),
                "good": _spread(runs, lambda run: run.good),
            }
        )
    report.add_table(f"{load.name}: clients that retry", rows)
    report.at_most("attempts a request with well-behaved clients", amplification["patient"], 1.1)


def compare_overloads(bench: Bench, report: Report) -> None:
    loads = [Load("1x", 1.0, STEADY_SECONDS), Load("2x", 2.0, STEADY_SECONDS)]
    rates = []
    for load in loads:
        runs = bench.runs(POLICIES[DEADLINE], load)
        rates.append(Spread.of([run.good * load.factor * bench.capacity for run in runs]))
    rows: list[dict[str, Any]] = [
        {"load": load.name, "good requests a second": rate} for load, rate in zip(loads, rates, strict=True)
    ]
    report.add_table("goodput beyond capacity", rows)
    report.at_least("goodput at 2x over goodput at 1x", rates[1].median / rates[0].median, 0.95)


def _parser() -> ArgumentParser:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--trace", type=Path, help="lengths are drawn from it")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    trace = read_trace(options.trace) if options.trace else drawn_trace()
    report = Report("overload", options.quick)
    bench = Bench(trace, 1 if options.quick else options.runs, shorter=0.2 if options.quick else 1.0)
    report.notes.append(f"lengths: {options.trace.name if options.trace else 'drawn from quantiles'}")
    report.notes.append(f"capacity: {bench.capacity:.2f} requests a second")
    ours = compare_policies(bench, report)
    judge(report, ours)
    compare_clients(bench, report)
    compare_overloads(bench, report)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
