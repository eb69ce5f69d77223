"""Tenants' parts of a contended machine: the fair order beside plain ones with the same admission: `python -m
labs.benchmarks.isolation [--runs 5] [--trace FILE] [--only equal light strategies]`.

Llama-3-8B on an A100 (simulated), as in `overload`, on seeds that no constant was tuned with. Equal tenants ask for 0.4
to 2 times what the machine completes, with three kinds of lengths, or with the times and lengths of a `--trace`; then
for 2.5 times as much for a minute, with deadlines of 0.7, 2 and 8 s beside each other, and one of them for most of it.
Light tenants ask for less than their shares beside a flood. A strategist is held against honest tenants who ask for as
much device time: its own over theirs, in the first 90 s, from the second minute on, and what lasts of that (`Gains`).
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from statistics import mean

from labs.benchmarks.mixes import DOCUMENTS
from labs.benchmarks.overload_loads import (
    BURST,
    DEVICE,
    ENGINE,
    MAX_TOKENS,
    MIXED,
    TENANTS,
    Load,
    Part,
    Traffic,
    drawn_trace,
    everyone,
)
from labs.benchmarks.overload_runs import GOOD, Run, simulate
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.strategies import HONEST, STRATEGIST, Gains, Leavers, LeavingLoop
from labs.simulation.arrival import Arrival
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder

FIRST_SEED = 8001
LOADS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 2.0)
FAIR, FCFS, EDF, SHORTEST = "fair", "fcfs", "earliest_deadline", "shortest_first"
FEWEST_REQUESTS = 50  # of a tenant, to be judged by itself
PARTLY_DATED = Load("1.4x, deadlines of none, 2, 2 and 8 s", (Part(TENANTS, 1.4, (None, 2.0, 2.0, 8.0)),))
TWO_CLASSES = Load("1.4x, two classes", (Part(TENANTS, 1.4, classes=(0, 1)),))
OLD_UNDATED, OLD_PARTLY, OLD_CLASSES = 0.76, (0.767, 0.07), (0.782, 0.075)
"""What the order before 26 November 2026 had: undated requests in time, and requests good, and admitted and missed."""
UNEQUAL = Load("0.7x, of which one has 70 %", (Part(("big",), 0.49), Part(("a", "b", "c"), 0.21)))
FIRST_SECONDS, SETTLED_SECONDS, END_SECONDS = 90.0, 120.0, 240.0

Figures = Mapping[str, Callable[[Run], float]]
FIGURES: Figures = {
    "good": lambda run: run.good,
    "good tokens": lambda run: run.good_tokens,
    "admitted, missed": lambda run: run.missed,
    "worst tenant": lambda run: run.worst_tenant,
    "longest quartile": lambda run: run.by_length[-1],
    "worst 30 s": lambda run: run.worst_window,
}


class Bench:
    """The same arrivals for every order."""

    def __init__(self, seeds: Sequence[int], shorter: float, report: Report) -> None:
        self.seeds, self.shorter, self.report = seeds, shorter, report

    def compare(self, name: str, load: Load, traffic: Traffic, orders: Sequence[str], figures: Figures) -> "Means":
        """Show the figures of each order, and return their means."""
        arrivals = [load.shortened(self.shorter).arrivals(traffic, seed) for seed in self.seeds]
        runs = {order: [simulate(f"order={order}", list(each)) for each in arrivals] for order in orders}
        found = {o: {what: [get(run) for run in each] for what, get in figures.items()} for o, each in runs.items()}
        rows = list[dict[str, object]]()
        for order, each in found.items():
            rows.append({"order": order} | {what: Spread.of(values) for what, values in each.items()})
        self.report.add_table(name, rows)
        return {order: {what: mean(values) for what, values in each.items()} for order, each in found.items()}


Means = dict[str, dict[str, float]]


def compare_equal(bench: Bench, traces: Sequence[Path]) -> None:
    """Show what fairness costs where no tenant needs it."""
    documents = Traffic("documents", drawn_trace(seed=5, prompts=DOCUMENTS), MAX_TOKENS)
    kinds = [Traffic.conversations(), Traffic.code(), documents, *map(Traffic.recorded, traces)]
    for traffic in kinds:
        for factor in LOADS:
            load = everyone(f"{factor:g}x", factor, is_recorded=traffic.is_recorded)
            _judge_equal(bench, f"{traffic.name}, {load.name}", load, traffic, 0.03 if traffic.is_recorded else 0.01)
    code = Traffic.code()
    _judge_equal(bench, UNEQUAL.name, UNEQUAL, code, 0.01)
    mixed = bench.compare(f"code, {MIXED.name}", MIXED, code, (FAIR, FCFS, EDF), FIGURES)
    bench.report.at_least(f"{MIXED.name}: good over earliest deadline's", mixed[FAIR]["good"] - mixed[EDF]["good"], 0.0)
    burst = bench.compare(f"code, {BURST.name}", BURST, code, (FAIR, FCFS), FIGURES)
    bench.report.at_least(f"{BURST.name}: good over fcfs's", burst[FAIR]["good"] - burst[FCFS]["good"], -0.015)
    _compare_kinds(bench, code)


def _compare_kinds(bench: Bench, code: Traffic) -> None:
    """Show tenants that send requests of several kinds each: with deadlines and without, and of two classes."""
    undated: Figures = {"undated, good": lambda run: run.share(GOOD, of=lambda arrival: arrival.deadline is None)}
    found = bench.compare(
        f"code, {PARTLY_DATED.name}", PARTLY_DATED, code, (FAIR, FCFS, EDF, SHORTEST), {**FIGURES, **undated}
    )
    bench.report.at_least(f"{PARTLY_DATED.name}: undated, good", found[FAIR]["undated, good"], OLD_UNDATED)
    _judge_kinds(bench, PARTLY_DATED.name, found[FAIR], OLD_PARTLY)
    levels: Figures = {
        "class 0, good": lambda run: run.share(GOOD, of=lambda arrival: arrival.priority_class == 0),
        "class 1, good": lambda run: run.share(GOOD, of=lambda arrival: arrival.priority_class == 1),
    }
    found = bench.compare(
        f"code, {TWO_CLASSES.name}", TWO_CLASSES, code, (FAIR, FCFS, EDF, SHORTEST), {**FIGURES, **levels}
    )
    _judge_kinds(bench, TWO_CLASSES.name, found[FAIR], OLD_CLASSES)


def _judge_kinds(bench: Bench, name: str, found: Mapping[str, float], old: tuple[float, float]) -> None:
    bench.report.at_least(f"{name}: good", found["good"], old[0])
    bench.report.at_most(f"{name}: admitted, missed", found["admitted, missed"], old[1])


def _judge_equal(bench: Bench, name: str, load: Load, traffic: Traffic, within: float) -> None:
    found = bench.compare(name, load, traffic, (FAIR, FCFS, EDF), FIGURES)
    for what in ("good", "good tokens"):
        best = max(found[FCFS][what], found[EDF][what])
        bench.report.at_least(f"{name}: {what} over the better plain order's", found[FAIR][what] - best, -within)
    bench.report.at_most(f"{name}: admitted, missed", found[FAIR]["admitted, missed"], 0.01)


def compare_light(bench: Bench) -> None:
    """Show light tenants beside a flood, both with deadlines and without."""
    code = Traffic.code()
    for deadline, words in ((2.0, "2 s"), (None, "no deadlines")):
        for count in (3, 30, 300):
            for flood, least in ((2.0, 0.96), (4.0, 0.94)):
                light = tuple(f"light-{number}" for number in range(count))
                load = Load("", (Part(light, 0.45, (deadline,)), Part(("flood",), flood, (deadline,))))
                _judge_light(bench, f"{count} light tenants beside a {flood:g}x flood, {words}", load, code, least)
    light = tuple(f"light-{number}" for number in range(20))
    load = Load("", (Part(light, 0.945 * 20 / 21), Part(("flood",), 2.0)))
    _judge_light(bench, "20 light tenants that ask for 0.945 of their shares", load, code, 0.9)


def _judge_light(bench: Bench, name: str, load: Load, traffic: Traffic, least: float) -> None:
    light = load.parts[0].tenants
    figures: Figures = {
        "light, good": lambda run: run.good_of(light),
        "worst of them": lambda run: _worst(run, light),
        "all, good": lambda run: run.good,
    }
    found = bench.compare(name, load, traffic, (FAIR, FCFS), figures)[FAIR]
    bench.report.at_least(f"{name}: good", found["light, good"], least)
    if found["worst of them"]:
        bench.report.at_least(f"{name}: worst over mean", found["worst of them"] / found["light, good"], 0.9)


def _worst(run: Run, tenants: Sequence[str]) -> float:
    """Return the smallest share of good requests of a tenant with `FEWEST_REQUESTS` and more; 0 if there is none."""
    own: dict[str, list[bool]] = {tenant: [] for tenant in tenants}
    for arrival, outcome in run.outcomes:
        if arrival.tenant in own:
            own[arrival.tenant].append(outcome is GOOD)
    return min((mean(good) for good in own.values() if len(good) >= FEWEST_REQUESTS), default=0.0)


@dataclass(frozen=True, slots=True)
class Habit:
    """The habit of one tenant: mean lengths in tokens, declarations and behaviour."""

    prompt: int = 600
    output: int = 120
    deadline: float | None = 2.0
    times: float = 1.0  # of the requests for an honest tenant's device time
    leaves_after: float = inf  # tokens of an answer
    sends_of_40_s: float = 40.0  # seconds of each 40 in which it sends

    def arrivals(self, tenant: str, share: float, random: Random) -> Iterator[Arrival]:
        rates, time = DEVICE.rates, 0.0
        cost = self.prompt * rates.prefill * 1.05 + self.output * rates.decode * 1.4  # with context and fixed parts
        while (time := time + random.expovariate(share * self.times / cost)) < END_SECONDS:
            prompt, output = (
                max(1, round(tokens * random.lognormvariate(-0.1, 0.45))) for tokens in (self.prompt, self.output)
            )
            if time % 40.0 < self.sends_of_40_s:
                yield Arrival(time, prompt, output, tenant=tenant, max_tokens=MAX_TOKENS, deadline=self.deadline)


LONG = Habit(6000, 80)
STRATEGIES: dict[str, tuple[Habit, int, float, float]] = {  # habit, honest tenants, least and most that it may gain
    "long prompts among four": (LONG, 3, 0.8, 1.05),
    "long prompts among ten": (LONG, 9, 0.6, 1.05),
    "deadlines of 8 s": (Habit(deadline=8.0), 3, 0.0, 1.05),
    "deadlines of 29 s": (Habit(deadline=29.0), 3, 0.0, 1.05),
    "deadlines of 0.7 s": (Habit(deadline=0.7), 3, 0.0, 1.05),
    "no deadlines": (Habit(deadline=None), 3, 0.0, 1.05),
    "four times as much": (Habit(times=4.0), 3, 0.0, 1.05),
    "ten times as much": (Habit(times=10.0), 3, 0.0, 1.05),
    "leaves after a token": (Habit(times=4.0, leaves_after=1), 3, 0.0, 1.05),
    "leaves after ten tokens": (Habit(times=4.0, leaves_after=10), 3, 0.0, 1.05),
    "leaves after 100 of 800 tokens": (Habit(output=800, leaves_after=100), 3, 0.0, 1.05),
    "ten requests for one": (Habit(60, 12, times=1.0), 3, 0.0, 1.05),
    "one request for five": (Habit(3000, 600), 3, 0.0, 1.05),
    "long answers to short prompts": (Habit(50, 900), 3, 0.0, 1.05),
    "bursts of ten seconds in forty": (Habit(times=4.0, sends_of_40_s=10.0), 3, 0.0, 1.05),
}
STRATEGIES_LOAD = 1.5


def compare_strategies(bench: Bench) -> None:
    rows = list[dict[str, object]]()
    for name, (habit, count, least, most) in list(STRATEGIES.items())[: None if bench.shorter == 1.0 else 2]:
        for deadline, words in ((2.0, "2 s"), (None, "none")):
            gains = [_gain(habit, Habit(deadline=deadline), count, seed) for seed in bench.seeds]
            first, later, lasting = zip(*gains, strict=True)
            shown = {"first 90 s": first, "from the second minute on": later, "lasting": lasting}
            spreads = {what: Spread.of(each) for what, each in shown.items()}
            rows.append({"strategy": name, "others' deadlines": words, **spreads})
            what = f"{name}, others with {'' if deadline else 'no '}deadlines: device time over an honest tenant's"
            bench.report.at_most(f"{what}, lasting", mean(lasting), most)
            if least and deadline:
                bench.report.at_least(what, mean(later), least)
    bench.report.add_table(f"strategies at {STRATEGIES_LOAD:g}x: device time over an honest tenant's", rows)


def _gain(habit: Habit, honest: Habit, count: int, seed: int) -> Gains:
    simulated = parse_simulated_policy(f"order={FAIR},{ENGINE}", DEVICE)
    core, recorder = simulated.make_core(), Recorder(DEVICE, Objective(), {})
    loop = LeavingLoop(core, DEVICE, recorder, simulated.engine.max_model_len)
    if habit.leaves_after < inf:
        core.observers.append(Leavers(loop, {STRATEGIST: habit.leaves_after}))
    share, random = STRATEGIES_LOAD / (count + 1), Random(seed)
    asked = list(habit.arrivals(STRATEGIST, share, random))
    others = [f"{HONEST[0]}-{number}" for number in range(count)]
    asked += [arrival for name in others for arrival in honest.arrivals(name, share, random)]
    loop.expect(sorted(asked, key=lambda arrival: arrival.time))
    own, others_mean = list[float](), list[float]()
    for until in (FIRST_SECONDS, SETTLED_SECONDS, END_SECONDS):
        loop.advance(until)
        own.append(recorder.tenants[STRATEGIST].seconds)
        others_mean.append(mean([recorder.tenants[name].seconds for name in others]))
    return Gains.of(own, others_mean)


SCENES: dict[str, Callable[[Bench, Namespace], None]] = {
    "equal": lambda bench, options: compare_equal(bench, options.trace),
    "light": lambda bench, _: compare_light(bench),
    "strategies": lambda bench, _: compare_strategies(bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="recorded traffic; may be repeated")
    parser.add_argument("--only", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--seeds-from", type=int, default=FIRST_SEED)
    options = parser.parse_args(arguments)
    count, shorter = (1, 0.05) if options.quick else (options.runs, 1.0)
    report = Report("isolation", options.quick)
    bench = Bench(range(options.seeds_from, options.seeds_from + count), shorter, report)
    for scene in options.only:
        SCENES[scene](bench, options)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
