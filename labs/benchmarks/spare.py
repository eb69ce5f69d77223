"""Batches beside interactive requests: python -m labs.benchmarks.spare [--trace FILE] [--runs 3]

Llama-3-8B on an A100 (simulated, published step times), 512 tokens a step, 256 sequences, lengths as Azure's
conversations of 2023, or lengths of a trace. Interactive requests are half of capacity, or a tenth, for two minutes;
beside them lies a backlog of the spare class, of the same tenant, that never runs empty. Their class promises nothing,
or what the default policy promises (`standard`: 80 ms between tokens). `share` is `--spare-share`. Times are those of
interactive requests, over those of the same requests without a backlog; medians over seeds, with the extremes. The most
that any scheduler can make of the same device is what it computes of more interactive requests than it can serve; or
what is left of its time, spent on prompts with answers of one token, its cheapest tokens.
"""

import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

from admission.spare import SPARE_STEP_S
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import SPARE_CLASS, Sequence
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, drawn_trace
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.simulation.arrival import Arrival, ClassTarget
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import Objective, PlannedWork, Recorder
from labs.simulation.study import capacity
from labs.simulation.traces import read_trace
from labs.simulation.workload import Workload
from quotas.policy.policy import CLASSES

POLICY = "order=fair,max_num_batched_tokens=512,max_num_seqs=256,prefill_chunk=512,max_waiting=100000"
LOADS = (0.5, 0.1)  # of capacity, of interactive requests
SHARES = (0.04, 0.25, 1.0)
SATURATING = 3.0  # times capacity
SECONDS = 120.0
BACKLOG = 400  # sequences of the spare class that wait or run
PROMISES = {
    "none": ClassTarget(),
    **{one.name: ClassTarget(one.ttft, one.time_per_output_token) for one in CLASSES if one.name == "standard"},
}


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--trace", type=Path, help="CSV of Azure's arrivals and lengths (default: drawn lengths)")
    options = parser.parse_args(arguments)
    runs, seconds = (1, SECONDS / 10) if options.quick else (options.runs, SECONDS)
    report = Report("spare", options.quick)
    trace = read_trace(options.trace) if options.trace else drawn_trace()
    policies = {share: parse_simulated_policy(f"{POLICY},spare_share={share}", DEVICE) for share in SHARES}
    rate = capacity(policies[SHARES[0]], Workload(tuple(trace), max_tokens=MAX_TOKENS), DEVICE)
    report.notes.append(f"capacity: {rate:.2f} requests a second")
    _tell_most(report, trace, policies[SHARES[0]], rate, seconds)
    found: dict[tuple[float, str, float], dict[str, list[float]]] = {}
    for load, (promise, target), seed in product(LOADS, PROMISES.items(), range(1, runs + 1)):
        arrivals = list(_arrivals(trace, load * rate, seed, seconds))
        alone = _Run(policies[SHARES[0]], target, arrivals, [], seconds)
        for share, policy in policies.items():
            row = found.setdefault((load, promise, share), {})
            for name, value in _compared(alone, _Run(policy, target, arrivals, trace, seconds)).items():
                row.setdefault(name, []).append(value)
    report.add_table(
        "beside a backlog, over alone",
        [
            {"load": load, "promised": promise, "share": share, **{name: Spread.of(row[name]) for name in row}}
            for (load, promise, share), row in found.items()
        ],
    )
    for load, promise in product(LOADS, PROMISES):
        row = {name: median(values) for name, values in found[load, promise, SHARES[0]].items()}
        case = f"load {load:g}, promised {promise}"
        report.at_least(f"{case}: device busy", row["busy"], 0.97)
        report.at_least(f"{case}: tokens", row["tokens"], 2.2)
        report.at_most(f"{case}: first token p99, less a step", row["first p99 less a step"], 1.05)
        report.at_most(f"{case}: between tokens p99", row["between p99"], 1.05)
    return report.finish(options.results)


def _tell_most(report: Report, trace: list[Arrival], policy: SimulatedPolicy, rate: float, seconds: float) -> None:
    """Tell the tokens of a device that is never idle and makes full steps, over those of interactive requests alone."""
    prompts = [arrival._replace(output_tokens=1) for arrival in trace]
    runs = [(trace, load) for load in LOADS] + [(trace, SATURATING), (prompts, SATURATING)]
    *alone, full, cheapest = (
        _Run(policy, ClassTarget(), list(_arrivals(lengths, load * rate, 1, seconds)), [], seconds).served
        for lengths, load in runs
    )
    rows: list[dict[str, object]] = [
        {"load": load, "same lengths": full / one, "prompts": 1 + (1 - one / full) * cheapest / one}
        for load, one in zip(LOADS, alone, strict=True)
    ]
    report.add_table("the most tokens of the device, over alone", rows)


def _arrivals(trace: list[Arrival], rate: float, seed: int, seconds: float) -> Iterator[Arrival]:
    random, time = Random(seed), 0.0
    while (time := time + random.expovariate(rate)) < seconds:
        lengths = random.choice(trace)
        yield lengths._replace(time=time, tenant="people", priority_class=0, max_tokens=MAX_TOKENS)


class _Run(Recorder):
    """One run to the end of the arrivals, with the times of interactive requests in it."""

    def __init__(
        self,
        policy: SimulatedPolicy,
        target: ClassTarget,
        arrivals: list[Arrival],
        backlog: list[Arrival],
        seconds: float,
    ) -> None:
        super().__init__(DEVICE, Objective(), {})
        self.firsts, self.gaps = array("d"), array("d")
        self.seconds, self._backlog, self._random = seconds, backlog, Random(0)
        self._last: dict[Sequence, float] = {}
        core = replace(policy, targets=()).make_core()
        promised = {0: target}
        longest = policy.engine.max_model_len
        self._loop = Loop(core, DEVICE, self, longest, target=lambda level: promised.get(level, ClassTarget()))
        self._loop.expect(arrivals)
        self._loop.expect([self._line(0.0) for _ in range(BACKLOG if backlog else 0)])
        self._loop.advance(seconds)

    def _line(self, now: float) -> Arrival:
        lengths = self._random.choice(self._backlog)
        return lengths._replace(time=now, tenant="people", priority_class=SPARE_CLASS, max_tokens=MAX_TOKENS)

    def completed(self, work: PlannedWork, elapsed: float, new_tokens: list[NewToken], now: float) -> None:  # type: ignore[override]
        for sequence, _, reason in new_tokens:
            if not sequence.is_spare:
                last = self._last.pop(sequence, None)
                if last is None:
                    self.firsts.append(now - sequence.arrival)
                else:
                    self.gaps.append(now - last)
                if reason is None:
                    self._last[sequence] = now
            elif reason is not None:
                self._loop.expect([self._line(now)])
        super().completed(work, elapsed, new_tokens, now)

    @property
    def served(self) -> int:
        return sum(tenant.prompt_tokens + tenant.output_tokens for tenant in self.tenants.values())


def _compared(alone: _Run, beside: _Run) -> dict[str, float]:
    found = {"busy alone": alone.busy / alone.seconds, "busy": beside.busy / beside.seconds}
    found["tokens"] = beside.served / alone.served
    for name, one, other in (("first", beside.firsts, alone.firsts), ("between", beside.gaps, alone.gaps)):
        ours, theirs = sorted(one), sorted(other)
        found |= {f"{name} p{100 * q:g}": quantile(ours, q) / quantile(theirs, q) for q in (0.5, 0.99)}
        found[f"{name} p99 alone, ms"] = 1000 * quantile(theirs, 0.99)
        if name == "first":
            found["first p99 less a step"] = (quantile(ours, 0.99) - SPARE_STEP_S) / quantile(theirs, 0.99)
    return found


if __name__ == "__main__":
    sys.exit(main())
