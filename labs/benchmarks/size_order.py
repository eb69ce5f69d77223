"""The shorter first inside a tenant, beside first come, first served.

    python -m labs.benchmarks.size_order [--trace FILE]

Llama-3-8B on an A100 (simulated, published step times). Nobody is refused.

Nobody refused: four tenants at 1.3 times capacity for 120 s (`--load`, `--seconds`), 192 slots. In time is a first
token in 2 s and then 0.1 s a token. Lengths are drawn from quantiles of Azure's conversations, or from the `--trace`,
whose format shows by itself.

Where slots bind: 27 tenants of unequal rates as in a chat arena, 64 slots, 1.4 times capacity for 300 s. Prompts are of
40 kinds whose answers differ in length, with noise by which knowing the kind ranks pairs with a Kendall tau of 0.55 to
0.6, and 8 to 600 tokens long in every kind. Learning to rank is shown beside the two.

Medians over seeds from 201 on, with the extremes: those of 101 to 103 were looked at while the rule was made.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random

from labs.benchmarks.overload_loads import DEVICE, LONGEST, MAX_TOKENS, TENANTS, drawn_trace
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import AttemptOutcome, Objective
from labs.simulation.study import SimulatedRun, capacity
from labs.simulation.summary import Summary
from labs.simulation.traces import read_trace
from labs.simulation.workload import Workload

FIRST_SEED = 201
PREFILL = "max_num_batched_tokens=512,prefill_chunk=512,overload=unbounded"
MANY, FEW = f"{PREFILL},max_num_seqs=192", f"{PREFILL},max_num_seqs=64"
FCFS, FAIR, RANKED = "first come, first served", "fair", "learning to rank"
POLICIES = {FCFS: "order=fcfs", FAIR: "order=fair", RANKED: "order=learned_rank"}
ARENA, KINDS, NOISE = 27, 40, 0.62  # tenants, kinds of prompts, and the deviation of an answer's logarithm
LOAD, SECONDS = 1.4, 300.0
Figure = Callable[["Run"], float]


@dataclass(frozen=True)
class Run:
    """One policy through one list of arrivals."""

    summary: Summary
    good: dict[int, bool]  # by session
    arrivals: list[Arrival]
    completion: float  # seconds from arrival to last token, on average

    def in_time(self, of: Callable[[Arrival], bool] = lambda _: True) -> float:
        found = [self.good[arrival.session] for arrival in self.arrivals if of(arrival)]
        return sum(found) / max(1, len(found))

    @property
    def worst_tenant(self) -> float:
        return min(self.in_time(lambda a, name=name: a.tenant == name) for name in {a.tenant for a in self.arrivals})

    @property
    def longest_quartile(self) -> float:
        cut = quantile(sorted(arrival.prompt_tokens for arrival in self.arrivals), 0.75)
        return self.in_time(lambda arrival: arrival.prompt_tokens > cut)

    @property
    def throughput(self) -> float:
        return self.summary.prompt_rate + self.summary.output_rate


def simulate(policy: str, arrivals: list[Arrival]) -> Run:
    run = SimulatedRun(parse_simulated_policy(policy, DEVICE), arrivals, DEVICE, Objective())
    gc.disable()
    try:
        while not run.loop.is_over:
            run.loop.advance(run.loop.next_at + 10.0)
    finally:
        gc.enable()
    good = {arrival.session: outcome is AttemptOutcome.GOOD for arrival, outcome in run.recorder.outcomes}
    durations = run.recorder.durations
    return Run(run.summary(), good, arrivals, sum(durations) / len(durations))


def drawn(trace: Sequence[Arrival], rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Returns Poisson arrivals of four tenants, with lengths of the trace."""
    random, made, time = Random(seed), list[Arrival](), 0.0
    while (time := time + random.expovariate(rate)) < seconds:
        one = random.choice(trace).alike
        prompt = min(one.prompt_tokens, LONGEST)
        made.append(
            one._replace(
                time=time,
                prompt_tokens=prompt,
                tenant=random.choice(TENANTS),
                max_tokens=MAX_TOKENS,
                session=len(made),
            )
        )
    return made


def arena(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Returns Poisson arrivals of tenants of whom the n-th sends 1/n as much as the first."""
    random, made, time = Random(seed), list[Arrival](), 0.0
    names = [f"client-{n}" for n in range(1, ARENA + 1)]
    shares = [1 / n for n in range(1, ARENA + 1)]
    typical = [exp(3.2 + 3.2 * kind / KINDS) for kind in range(KINDS)]
    while (time := time + random.expovariate(rate)) < seconds:
        kind, tenant = random.randrange(KINDS), random.choices(names, shares)[0]
        prompt = round(exp(random.uniform(2.1, 6.4)))
        output = min(MAX_TOKENS, max(1, round(typical[kind] * exp(random.gauss(0.0, NOISE)))))
        begins = (50 + kind, 150 + kind)
        made.append(Arrival(time, prompt, output, len(made), tenant, max_tokens=MAX_TOKENS, begins=begins))
    return made


def _capacity(settings: str, requests: Sequence[Arrival]) -> float:
    policy = parse_simulated_policy(f"order=fair,{settings}", DEVICE)
    return capacity(policy, Workload(tuple(requests), max_tokens=MAX_TOKENS), DEVICE)


def compare_waits(report: Report, trace: Sequence[Arrival], load: float, seconds: float, seeds: range) -> None:
    rate = load * _capacity(MANY, [one._replace(tenant=TENANTS[n % 4]) for n, one in enumerate(trace)])
    runs = {
        name: [simulate(f"{POLICIES[name]},{MANY}", drawn(trace, rate, seconds, seed)) for seed in seeds]
        for name in (FCFS, FAIR)
    }
    figures: dict[str, Figure] = {
        "in time": Run.in_time,
        "worst tenant": lambda run: run.worst_tenant,
        "longest quartile": lambda run: run.longest_quartile,
        "median s": lambda run: run.summary.first_token.p50 or 0.0,
        "p99 s": lambda run: run.summary.first_token.p99 or 0.0,
        "gap, tokens": lambda run: run.summary.gap_tokens,
        "tokens/s": lambda run: run.throughput,
    }
    _table(report, f"nobody refused, {load:g}x for {seconds:g} s: times to the first token", runs, figures)
    first, ours = (_means(runs[name], figures) for name in (FCFS, FAIR))
    report.at_least("in time", ours["in time"], 0.66)
    report.at_most("median seconds", ours["median s"], 1.3)
    report.at_most("p99 over first come, first served", ours["p99 s"] / first["p99 s"], 1.5)
    report.at_least("throughput over first come, first served", ours["tokens/s"] / first["tokens/s"], 0.99)


def compare_completions(report: Report, seconds: float, seeds: range) -> None:
    rate = LOAD * _capacity(FEW, arena(20.0, 100.0, 0))
    runs = {
        name: [simulate(f"{POLICIES[name]},{FEW}", arena(rate, seconds, seed)) for seed in seeds] for name in POLICIES
    }
    figures: dict[str, Figure] = {
        "completion s": lambda run: run.completion,
        "p99 s": lambda run: run.summary.duration.p99 or 0.0,
        "median first token s": lambda run: run.summary.first_token.p50 or 0.0,
        "tokens/s": lambda run: run.throughput,
    }
    _table(report, f"where slots bind, {LOAD:g}x for {seconds:g} s", runs, figures)
    first, ours = (_means(runs[name], figures)["completion s"] for name in (FCFS, FAIR))
    report.at_most("mean completion over first come, first served", ours / first, 0.72)


def _table(report: Report, title: str, runs: dict[str, list[Run]], figures: dict[str, Figure]) -> None:
    report.add_table(
        title,
        [
            {"order": name} | {what: Spread.of([get(run) for run in each]) for what, get in figures.items()}
            for name, each in runs.items()
        ],
    )


def _means(runs: list[Run], figures: dict[str, Figure]) -> dict[str, float]:
    return {what: sum(get(run) for run in runs) / len(runs) for what, get in figures.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--trace", type=Path, help="lengths are drawn from it")
    parser.add_argument("--load", type=float, default=1.3, help="times capacity, where nobody is refused")
    parser.add_argument("--seconds", type=float, default=120.0, help="of it")
    options = parser.parse_args(arguments)
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if options.quick else options.runs))
    report = Report("size_order", options.quick)
    trace = read_trace(options.trace) if options.trace else drawn_trace()
    report.notes.append(f"lengths: {options.trace.name if options.trace else 'drawn from quantiles'}")
    compare_waits(report, trace, options.load, 20.0 if options.quick else options.seconds, seeds)
    compare_completions(report, 30.0 if options.quick else SECONDS, seeds)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
