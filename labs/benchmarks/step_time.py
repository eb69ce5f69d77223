"""The step-time model's prediction of a run that it has not seen: `python -m labs.benchmarks.step_time`.

`sluice serve` with the embedded model and an event log; clients on another core send requests of mixed lengths on a
timetable, then many at once. Coefficients are fitted to the steps of one run. Of another, with other requests, they
predict every step; and the simulator, given its arrivals and the coefficients, says when its requests are answered,
which is compared with when they were. Steps with the same work do not take the same time: how far they are from the
median of their like, all of the same run, is printed beside the error, since no model of the work can know more.
"""

import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from admission.core import PRIOR_STEP_TIME, CoreConfig, make_core
from admission.event_logs.event_log import replay
from admission.event_logs.numbers import in_seconds
from admission.step_times.step_time import StepTime, StepTimeModel, StepWork
from backend.config import Batching, EngineConfig, KVAllocation
from backend.scheduler.sequence import Sequence as Request
from backend.scheduler.sequence import SequenceStatus
from gateway.telemetry.event_log_file import read_event_log
from labs.benchmarks import machine
from labs.benchmarks.load import post
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served_afresh
from labs.benchmarks.traffic import Due, Traffic
from labs.simulation.device import Device, Piece
from labs.simulation.loop import Loop
from labs.simulation.recorder import Objective, Recorder
from labs.simulation.traces import read_trace

TENANTS = ("chat", "summaries")
SLOTS = 32
REQUESTS_PER_SECOND = 12.0  # requests a second of the timetable
BURST_REQUESTS = 120  # requests at its end
MAX_WAITING = 10_000
SPECIAL_TOKENS, VOCABULARY = 2, 1000
MAX_ERROR = 0.1
MIN_LIKE_STEPS = 8  # steps of the same work, from which their spread is read

JUDGED = ("all steps together, s", "one step of the simulator, mean, s", "first arrival to last token, s",
          "first token, p50, s", "first token, p99, s", "whole request, p50, s", "whole request, p99, s")  # fmt: skip

Step = tuple[StepWork, float]  # and how long it took, in seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run that was predicted from another."""

    steps: int
    step_error: float  # median, relative
    step_spread: float  # the same, of what the steps of the run itself say of their like
    pairs: dict[str, tuple[float, float]]  # predicted and measured


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the timetable, before the burst")
    options = parser.parse_args(arguments)
    runs, seconds, burst = (1, 2.0, 8) if options.quick else (options.runs, options.seconds, BURST_REQUESTS)
    report = Report("step_time", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    found = []
    for run in range(runs):
        with TemporaryDirectory() as directory:
            seen = _serve(server_core, Path(directory, "seen"), seconds, burst, 2 * run)
            unseen = _serve(server_core, Path(directory, "unseen"), seconds, burst, 2 * run + 1)
            found.append(_compare(seen, unseen))
    _tell(report, found)
    return report.finish(options.results)


# serving


def _serve(core: int, directory: Path, seconds: float, burst: int, seed: int) -> Path:
    """One run of a server of its own; its event log."""
    directory.mkdir()
    log = directory / "events"
    settings = {"max_num_seqs": SLOTS, "max_waiting": MAX_WAITING, "event_log": log, "event_log_bytes": "1GiB"}
    with served_afresh(core, TENANTS, directory, **settings) as server, Traffic(server.port) as clients:
        clients.run(600.0, _timetable(server, seconds, burst, Random(seed)), until_answered=True)
    return log


def _timetable(server: Served, seconds: float, burst: int, random: Random) -> list[Due]:
    moments, at = [], 0.0
    while (at := at + random.expovariate(REQUESTS_PER_SECOND)) < seconds:
        moments.append(at)
    return [_due(server, at, random) for at in [*moments, *[seconds] * burst]]


def _due(server: Served, at: float, random: Random) -> Due:
    """Chats have short prompts and long answers, summaries the reverse."""
    tenant = random.choice(TENANTS)
    long, short = _length(random, 200, 1000), _length(random, 40, 300)
    prompt, answer = (short, long // 2) if tenant == "chat" else (long, short)
    ids = [random.randrange(SPECIAL_TOKENS, VOCABULARY) for _ in range(prompt)]
    body = {"model": "embedded", "prompt": ids, "max_tokens": max(4, answer), "ignore_eos": True, "stream": True}
    return Due(at, tenant, post("/v1/completions", body | {"temperature": 0}, server.keys[tenant]))


def _length(random: Random, middle: int, most: int) -> int:
    return min(most, max(4, round(middle * random.lognormvariate(0, 0.7))))


# what was measured


@dataclass(slots=True)
class Measured:
    """One run, as its event log has it; times in seconds."""

    engine: EngineConfig
    steps: list[Step] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)  # from arrival
    duration: list[float] = field(default_factory=list)  # from arrival to the last token
    began: float = inf
    ended: float = 0.0
    _waiting: dict[str, Request] = field(default_factory=dict)  # for their first tokens
    _open: dict[str, Request] = field(default_factory=dict)

    @classmethod
    def read(cls, log: Path) -> "Measured":
        lines = read_event_log(log)
        measured = cls(_engine_of(json.loads(next(lines))))
        sequences: dict[str, Request] = {}

        def make_model(prior: StepTime, prior_weight: float) -> StepTimeModel:
            return StepTimeModel(
                prior, prior_weight, observed=lambda work, seconds: measured.steps.append((work, seconds))
            )

        for entry in replay(read_event_log(log), sequences, make_model):
            if entry[0] == "arrive":
                measured._arrived(in_seconds(entry[1]), sequences[entry[2]])
            elif entry[0] == "done":
                measured._completed(in_seconds(entry[1]))
        return measured

    @property
    def busy(self) -> float:
        return sum(seconds for _, seconds in self.steps)

    def _arrived(self, now: float, sequence: Request) -> None:
        self.began = min(self.began, now)
        self._waiting[sequence.id] = self._open[sequence.id] = sequence

    def _completed(self, now: float) -> None:
        """A step: some have their first token now, some their last."""
        for sequence in [waiting for waiting in self._waiting.values() if waiting.output]:
            self.first_token.append(now - sequence.arrival)
            del self._waiting[sequence.id]
        for sequence in [living for living in self._open.values() if living.status is SequenceStatus.FINISHED]:
            self.duration.append(now - sequence.arrival)
            del self._open[sequence.id]
        self.ended = now


def _engine_of(header: list[Any]) -> EngineConfig:
    settings = header[2]
    kinds = {"batching": Batching(settings["batching"]), "kv_allocation": KVAllocation(settings["kv_allocation"])}
    return EngineConfig(**(settings | kinds))


# what was predicted


def _compare(seen: Path, unseen: Path) -> Figures:
    """One run: predicted over measured, and errors."""
    model = StepTimeModel(PRIOR_STEP_TIME)
    for work, seconds in Measured.read(seen).steps:
        model.observe(work, seconds)
    measured = Measured.read(unseen)
    predicted = [model.fitted.seconds(work) for work, _ in measured.steps]
    errors = [abs(ours - seconds) / seconds for ours, (_, seconds) in zip(predicted, measured.steps, strict=True)]
    simulated, took = _simulate(unseen, measured.engine, model.fitted)
    pairs = {
        "all steps together, s": (sum(predicted), measured.busy),
        "one step of the simulator, mean, s": (simulated.busy / simulated.steps, measured.busy / len(measured.steps)),
        "first arrival to last token, s": (took, measured.ended - measured.began),
    }
    for name, ours, theirs in (
        ("first token", sorted(simulated.first_token_times), sorted(measured.first_token)),
        ("whole request", sorted(simulated.durations), sorted(measured.duration)),
    ):
        for share in (0.5, 0.9, 0.99):
            pairs[f"{name}, p{share * 100:g}, s"] = quantile(ours, share), quantile(theirs, share)
    return Figures(len(errors), median(errors), _spread(measured.steps), pairs)


def _spread(steps: list[Step]) -> float:
    """The median relative distance of a step from the median of its like."""
    alike = defaultdict(list)
    for work, seconds in steps:
        alike[work.prefill_tokens // 16, work.decode_tokens, work.decode_context // 128].append(seconds)
    crowds = [(median(times), times) for times in alike.values() if len(times) >= MIN_LIKE_STEPS]
    return median(abs(middle - seconds) / seconds for middle, times in crowds for seconds in times)


def _simulate(log: Path, engine: EngineConfig, fitted: StepTime) -> tuple[Recorder, float]:
    """The log's arrivals on a device that takes as long as predicted; seconds from the first to the last token."""
    _, prefill, decode, decode_context, prefill_context, _, _ = fitted.coefficients
    rates = Piece(0.0, prefill, decode, decode_context, prefill_context)
    device = Device("fitted", fitted.seconds, rates, engine.num_blocks * engine.block_size)
    recorder = Recorder(device, Objective(), {})
    core = make_core(CoreConfig(max_waiting=MAX_WAITING), engine)
    return recorder, Loop(core, device, recorder, engine.max_model_len).run(read_trace(log))


# telling


def _tell(report: Report, found: list[Figures]) -> None:
    rows: list[dict[str, object]] = []
    for name in found[0].pairs:
        pairs = [figures.pairs[name] for figures in found]
        off = Spread.of([abs(ours / theirs - 1) for ours, theirs in pairs])
        predicted, measured = (Spread.of(side) for side in zip(*pairs, strict=True))
        rows.append({"of the unseen run": name, "predicted": predicted, "measured": measured, "relative error": off})
        if name in JUDGED:
            report.at_most(f"{name[:-3]}: relative error of the prediction", off.median, MAX_ERROR)
    report.add_table(f"{found[0].steps:,} steps predicted, median (extremes) over runs", rows)
    errors = Spread.of([figures.step_error for figures in found])
    spread = Spread.of([figures.step_spread for figures in found])
    report.notes = [
        f"median relative error of a step: {errors}",
        f"median relative distance of a step from the median of its like in the same run: {spread}",
    ]
    report.at_most("one step: median relative error of the prediction", errors.median, MAX_ERROR)


if __name__ == "__main__":
    sys.exit(main())
