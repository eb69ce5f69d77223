"""The knee that `sluice plan --trace` predicts, beside the measured one: `python -m labs.benchmarks.plan_live [--models
embedded smollm2]`.

`sluice serve` on one core, clients on another, once with an event log under half of its load: its step times and its
settings are the device of the plan. The knee, at which 99 % of the requests are good, is planned for the lengths of
that load and for others that the server has not seen. Then `sluice bench`'s generator sends the requests that the plan
drew, at the planned rate and from there in steps of `RATE_STEP_SHARE` until the share of good ones crosses 99 %. With
another draw the knee would differ by chance, by a tenth with 1,000 requests: ten of them decide. A rate with too few
good ones is sent once more, and the better share counts: what else runs on the machine makes a run worse, never better.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from labs.bench.benchmark import Benchmark
from labs.bench.scenario import Scenario
from labs.bench.workloads import Lengths
from labs.benchmarks import machine
from labs.benchmarks.report import Report, scenario_parser
from labs.benchmarks.served import served
from labs.cli.capacity import measured_replica
from labs.simulation.recorder import Objective
from labs.simulation.search.replicas import GOOD_SHARE
from labs.simulation.traces import read_trace

TENANT = "acme"
RATE_STEP_SHARE, MAX_STEPS = 0.05, 5  # of the planned knee, either way
TRACE_REQUESTS = 3000
MAX_ERROR_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Model:
    """A model and what is asked of it."""

    name: str
    objective: Objective
    rate: float  # requests a second while the event log is written, about half of the capacity of a core
    requests: int  # of each rate, at least
    traces: Mapping[str, tuple[Lengths, Lengths]]  # of prompts and answers, in tokens; the first one is recorded


MODELS = {
    "embedded": Model(
        "embedded",
        Objective(1.0, 0.1),
        20.0,
        400,
        {
            "recorded": (Lengths(150, 0.5), Lengths(60, 0.5)),
            "unseen": (Lengths(500, 0.4), Lengths(20, 0.6)),
        },
    ),
    "smollm2": Model(
        "smollm2",
        Objective(3.0, 0.3),
        3.0,
        120,
        {
            "recorded": (Lengths(60, 0.4), Lengths(20, 0.5)),
            "unseen": (Lengths(120, 0.4), Lengths(10, 0.5)),
        },
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--log-seconds", type=float, default=30.0, help="of the load whose event log is the device")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.log_seconds = ["embedded"], 4.0
    report = Report("plan_live", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    for name in options.models:
        with TemporaryDirectory() as directory:
            _measure(report, options, MODELS[name], server_core, Path(directory))
    return report.finish(options.results)


def _measure(report: Report, options: Namespace, model: Model, core: int, directory: Path) -> None:
    log, traces = directory / "events", {name: _trace(directory, name, *own) for name, own in model.traces.items()}
    settings, seeds = {"model": model.name}, count(1)  # each run has prompts that no other has sent
    with served(core, [TENANT], directory / "recorded", event_log=log, **settings) as server:
        _bench(server.port, server.keys[TENANT], traces["recorded"], model, options.log_seconds, 0).run(model.rate)
    with served(core, [TENANT], directory / "measured", **settings) as server:
        for name, trace in traces.items():
            replica = measured_replica(read_trace(trace), log, model.objective, 50 if options.quick else model.requests)
            knee = replica.knee(lambda _: None)
            if knee is None:
                report.notes.append(f"{model.name}, {name}: no rate is planned: one request alone takes too long")
                continue
            drawn = replica.traffic(knee.rate)
            _write(trace, ((knee.rate * one.time, one.prompt_tokens, one.output_tokens) for one in drawn))
            seconds = 2.0 if options.quick else drawn[-1].time

            def goodput(load: float, trace: Path = trace, rate: float = knee.rate, seconds: float = seconds) -> float:
                bench = _bench(server.port, server.keys[TENANT], trace, model, seconds / load, next(seeds))
                return bench.run(load * rate).summary.all.goodput

            _tell(report, f"{model.name}, {name}", knee.rate, crossing(goodput))


def crossing(measure: Callable[[float], float]) -> dict[float, float]:
    """Measure the good share at multiples of the planned knee, from 1 up or down until it crosses `GOOD_SHARE`."""

    def goodput(load: float) -> float:
        share = measure(load)
        return share if share >= GOOD_SHARE else max(share, measure(load))

    good = {1.0: goodput(1.0)}
    step = RATE_STEP_SHARE if good[1.0] >= GOOD_SHARE else -RATE_STEP_SHARE
    for number in range(1, MAX_STEPS + 1):
        load = 1.0 + number * step
        good[load] = goodput(load)
        if (good[load] >= GOOD_SHARE) != (good[1.0] >= GOOD_SHARE):
            break
    return good


def _tell(report: Report, name: str, planned: float, good: Mapping[float, float]) -> None:
    measured = planned * knee_of(good)
    rows: list[dict[str, object]] = [
        {"requests/s": load * planned, "good %": 100 * share} for load, share in sorted(good.items())
    ]
    report.add_table(f"{name}: planned {planned:.3g} requests/s, measured {measured:.3g}", rows)
    report.at_most(f"{name}: planned knee off the measured one, share", abs(planned / measured - 1), MAX_ERROR_SHARE)


def knee_of(good: Mapping[float, float]) -> float:
    """Return the load at which the share of good requests falls below `GOOD_SHARE`, by a straight line between two; the
    first or the last load where it is below or above at all of them.
    """
    rates = sorted(good)
    for low, high in pairwise(rates):
        if good[low] >= GOOD_SHARE > good[high]:
            return low + (high - low) * (good[low] - GOOD_SHARE) / (good[low] - good[high])
    return rates[-1] if good[rates[-1]] >= GOOD_SHARE else rates[0]


def _bench(port: int, key: str, trace: Path, model: Model, seconds: float, seed: int) -> Benchmark:
    targets = {"ttft": model.objective.first_token, "per_token": model.objective.per_token}
    tenant = {"key": key, "trace": trace, "body": {"ignore_eos": True}}
    scenario = {"seed": seed, "seconds": seconds, "targets": targets, "tenants": {TENANT: tenant}}
    return Benchmark(f"http://127.0.0.1:{port}", Scenario.parse(scenario, "plan_live"))


def _trace(directory: Path, name: str, prompts: Lengths, answers: Lengths) -> Path:
    """Write a trace of one request a second on average, to be sent several times as fast."""
    random = Random(name)
    times = accumulate(random.expovariate(1.0) for _ in range(TRACE_REQUESTS))
    path = directory / f"{name}.csv"
    _write(path, ((at, prompts.tokens(random), answers.tokens(random)) for at in times))
    return path


def _write(path: Path, requests: Iterable[tuple[float, int, int]]) -> None:
    """Write times, prompts and answers in the form of Azure's traces."""
    lines = [f"{at:.6f},{prompt},{answer}" for at, prompt, answer in requests]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
