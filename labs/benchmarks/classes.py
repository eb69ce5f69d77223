"""The worth of a class of service: `python -m labs.benchmarks.classes [--runs 3]`.

Llama-3-8B on an A100 (simulated, published step times), 512 tokens a step, 64 sequences, lengths as Azure's
conversations of 2023 (`labs.benchmarks.overload`). Interactive requests are 40 % of capacity. From the second minute on
batch requests come at 120 % of it for three minutes: of the same tenant, or of another one of equal weight. Times to
the first token, in seconds, of arrivals in those three minutes; medians over seeds, with the extremes. Classes age as
in the default policy (`batch` 40 s behind the first class), and 4 s behind it.
"""

import sys
from dataclasses import dataclass
from random import Random
from statistics import median

from admission.scheduling_policy import SchedulingPolicy
from backend.scheduler.sequence import Sequence
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, drawn_trace
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder, TrackedRequest
from labs.simulation.study import capacity
from labs.simulation.workload import Workload
from quotas.policy.policy import CLASSES

POLICY = "order=fair,max_num_batched_tokens=512,max_num_seqs=64,prefill_chunk=512,max_waiting=100000"
INTERACTIVE, BATCH = 0, 2
LOADS = {INTERACTIVE: 0.4, BATCH: 1.2}  # of capacity
START, END = 60.0, 240.0  # of the batch work, in seconds
DEFAULT = tuple(level.aging for level in CLASSES)
AGINGS = {f"{DEFAULT[BATCH]:g} s": DEFAULT, "4 s": (0.0, 2.0, 4.0)}


@dataclass(frozen=True, slots=True)
class Case:
    """The tenant of the batch work, and the aging of classes."""

    tenant: str
    aging: str

    def policy(self) -> SimulatedPolicy:
        policy = parse_simulated_policy(POLICY, DEVICE)
        return SimulatedPolicy("classes", policy.core, policy.engine, SchedulingPolicy(offsets=AGINGS[self.aging]))


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=3).parse_args(arguments)
    runs, shorter = (1, 0.1) if options.quick else (options.runs, 1.0)
    report = Report("classes", options.quick)
    trace = drawn_trace()
    rate = capacity(parse_simulated_policy(POLICY, DEVICE), Workload(tuple(trace), max_tokens=MAX_TOKENS), DEVICE)
    report.notes.append(f"capacity: {rate:.2f} requests a second")
    rows: dict[Case, dict[str, list[float]]] = {}
    for case in [Case(tenant, aging) for tenant in ("same", "another") for aging in AGINGS]:
        for seed in range(1, runs + 1):
            for what, value in _measure(case, trace, rate, seed, shorter).items():
                rows.setdefault(case, {}).setdefault(what, []).append(value)
    report.add_table(
        "seconds to the first token, median over runs (extremes)",
        [
            {"batch work of": f"{case.tenant} tenant", "batch ages": case.aging}
            | {what: Spread.of(values) for what, values in row.items()}
            for case, row in rows.items()
        ],
    )
    default, other = (
        {what: median(values) for what, values in rows[Case(tenant, f"{DEFAULT[BATCH]:g} s")].items()}
        for tenant in ("same", "another")
    )
    short = median(rows[Case("same", "4 s")]["interactive p50"])
    report.at_most(
        "interactive p50 beside its tenant's batch work, over that at 4 s", default["interactive p50"] / short, 0.75
    )
    ratio = other["interactive p99"] / default["interactive p99"]
    report.at_most("interactive p99 beside another tenant's batch work, over that beside its own", ratio, 0.2)
    return report.finish(options.results)


def _measure(case: Case, trace: list[Arrival], rate: float, seed: int, shorter: float) -> dict[str, float]:
    policy, recorder = case.policy(), _FirstTokens()
    arrivals = _arrivals(case.tenant, trace, rate, seed, shorter)
    Loop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len).run(arrivals)
    found = {}
    for name, level in (("interactive", INTERACTIVE), ("batch", BATCH)):
        times = sorted(time for at, of, time in recorder.found if of == level and START * shorter <= at < END * shorter)
        found |= {f"{name} p{share * 100:g}": quantile(times, share) for share in (0.5, 0.99)}
    return found | {"batch, longest": max((time for _, of, time in recorder.found if of == BATCH), default=0.0)}


def _arrivals(tenant: str, trace: list[Arrival], rate: float, seed: int, shorter: float) -> list[Arrival]:
    random, made = Random(seed), []
    for level, load in LOADS.items():
        time, end = (START * shorter if level == BATCH else 0.0), END * shorter
        whose = "people" if level == INTERACTIVE or tenant == "same" else "archive"
        while (time := time + random.expovariate(load * rate)) < end:
            lengths = random.choice(trace)
            made.append(lengths._replace(time=time, tenant=whose, priority_class=level, max_tokens=MAX_TOKENS))
    return sorted(made)


class _FirstTokens(Recorder):
    """Keeps each one's arrival, class and time to the first token."""

    def __init__(self) -> None:
        super().__init__(DEVICE, Objective(), {})
        self.found: list[tuple[float, int, float]] = []

    def _done(self, sequence: Sequence, request: TrackedRequest, now: float) -> None:
        super()._done(sequence, request, now)
        first = request.first_token - request.arrival.time
        self.found.append((request.arrival.time, request.arrival.priority_class, first))


if __name__ == "__main__":
    sys.exit(main())
