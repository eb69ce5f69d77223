"""The cost of deciding, beside a step: `python -m labs.benchmarks.decision_cost`.

256 sequences run, others wait; some end each step and the next of the queue are admitted. Planning and accounting are
timed with everything they call: the fair queue, the ledger, the step-time model, the forecast of memory. So is a
refusal of an infeasible request: from its arrival, after a step that changed something, to the exception with the
reason; every other one has a long prompt, whose age bonus is weighed as well.

An arrival is timed where 1,024 others wait with pressing deadlines: a request that is due before some of them and
behind others, which is admitted and leaves at once.

Then the cost of an all-decode step to the event loop, by the rows of the step: accounting, planning and launching as
`StepLoop` does them, under the observers of a gateway (telemetry and metrics of the engine), with the event log and
without. The delivery of tokens to clients is not part of it.
"""

import gc
import sys
import time
from collections import deque
from itertools import count
from random import Random
from statistics import mean, median
from typing import Any

from admission.controller import Controller
from admission.core import PRIOR_STEP_TIME, CoreConfig, make_core
from admission.event_logs.event_log import make_logged_core
from admission.outcome import DeadlineInfeasible
from admission.step_times.step_time import StepTimeModel
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence
from backend.step_loop import StepLoop
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.metrics.engine import EngineMetrics
from gateway.telemetry.metrics.registry import Registry
from labs.benchmarks.instructions import instructions
from labs.benchmarks.report import Report, Spread, scenario_parser

NUM_RUNNING = 256
STEP_SECONDS = 7.4e-3  # seconds, of an 8B model on a large GPU at this batch
END = 3
STEADY, TURNOVER = "nobody joins, us", "one joins in four steps, us"
REFUSAL = "deciding a refusal, us"
ADMISSION = "deciding an arrival, us"
PRESSING, DUE = (1_024, 50), (4.0, 9.0)  # waiting, tenants; seconds in which they are due
HOPELESS_DEADLINE_SECONDS = 0.01  # deadline of a refused request, in seconds
PROMPTS = (200, 800)  # tokens of refused requests, by turns
SMALL, LARGE = (1_000, 50), (100_000, 1_000)  # waiting, tenants
ROWS = {16: 8.0, 256: 3.0, 1_000: 3.0}  # of a step, and the microseconds that a token may cost with the event log
STEP_OF_ONE = 15.0  # microseconds that a step of one row may cost of the core alone
STEP_NS = 7_400_000  # the same step in nanoseconds, in which real clocks count
CORE, OBSERVED, LOGGED = "core alone", "with telemetry", "with telemetry and event log"


class Machine:
    """A core with a full batch, stepped on a clock of its own."""

    def __init__(self, waiting: int, tenants: int, slots: int = NUM_RUNNING) -> None:
        engine = EngineConfig(
            num_blocks=60_000,
            max_model_len=4096,
            max_num_seqs=slots,
            max_num_batched_tokens=2048,
            prefill_chunk=512,
        )
        self.core: Controller = make_core(CoreConfig(max_waiting=10**6), engine)
        self._tenants = tenants
        self._flying: deque[Batch] = deque()
        self._now, self._random, self._numbers = 0.0, Random(1), count()
        prompt = [1] * 200
        for n in range(NUM_RUNNING + waiting):
            self._now += 1e-5
            self.core.arrive(self._sequence(str(n), prompt), self._now)
        while sum(1 for s in self.core.scheduler.running.values() if s.output) < NUM_RUNNING:
            self.step(ended=0)

    def step(self, ended: int) -> float:
        """Plan one step and account for another in which `ended` sequences end; seconds of deciding."""
        self._now += STEP_SECONDS
        start = time.perf_counter()
        while (batch := self.core.schedule(self._now)) is not None:
            self._flying.append(batch)
        planned = time.perf_counter()
        oldest = self._flying.popleft()
        tokens = [END if row < ended else 5 for row in range(len(oldest.sampled))]
        output = StepOutput(oldest.step, tokens, STEP_SECONDS)
        completing = time.perf_counter()
        self.core.update_from_output(output, self._now)
        return planned - start + time.perf_counter() - completing

    def refuse(self, number: int) -> float:
        """Seconds of deciding that a newcomer would be too late."""
        prompt = [1] * PROMPTS[number % len(PROMPTS)]
        hopeless = self._sequence(f"hopeless {number}", prompt, first_token_by=self._now + HOPELESS_DEADLINE_SECONDS)
        start = time.perf_counter()
        try:
            self.core.arrive(hopeless, self._now)
        except DeadlineInfeasible:
            return time.perf_counter() - start
        raise AssertionError("a hopeless request was admitted")

    def press(self, waiting: int) -> float:
        """Seconds of deciding that a newcomer with a deadline may wait, beside `waiting` others that have one."""
        scheduler = self.core.scheduler
        for joined in list(scheduler.running.values())[NUM_RUNNING:]:
            self.core.finish_sequence(joined, FinishReason.CANCELLED, self._now)
        while len(scheduler.waiting) < waiting:
            self._arrive_pressing()
        newcomer, took = self._arrive_pressing()
        self.core.finish_sequence(newcomer, FinishReason.CANCELLED, self._now)
        return took

    def _arrive_pressing(self) -> tuple[Sequence, float]:
        by = self._now + self._random.uniform(*DUE)
        newcomer = self._sequence(f"newcomer {next(self._numbers)}", [1] * PROMPTS[0], 100, by)
        start = time.perf_counter()
        self.core.arrive(newcomer, self._now)
        return newcomer, time.perf_counter() - start

    def _sequence(
        self, name: str, prompt: list[int], max_tokens: int = 2000, first_token_by: float | None = None
    ) -> Sequence:
        tenant, sampling = f"t{self._random.randrange(self._tenants)}", SamplingParams(temperature=0)
        ends = frozenset([END])
        request = PromptRequest(name, tenant, prompt, sampling, max_tokens, 0, ends, first_token_by=first_token_by)
        return Sequence(request)


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=5).parse_args(arguments)
    runs, steps = (1, 40) if options.quick else (options.runs, 400)
    report = Report("decision_cost", options.quick)
    small, large = (_measure(*crowd, runs, steps) for crowd in (SMALL, LARGE))
    report.add_table(f"a step and a refusal at {NUM_RUNNING} running, median (extremes)", [small, large])
    cost, grown = (row[TURNOVER].median for row in (small, large))
    report.at_most(
        f"share of a {STEP_SECONDS * 1e3:g} ms step at 1,000 waiting, 50 tenants", cost / 1e6 / STEP_SECONDS, 0.05
    )
    report.at_most("growth to 100,000 waiting, 1,000 tenants", grown / cost, 1.5)
    for (_, tenants), row in zip((SMALL, LARGE), (small, large), strict=True):
        report.at_most(f"{REFUSAL}, {tenants:,} tenants", row[REFUSAL].median, 200)
    row = _measure_pressing(*PRESSING, runs, steps)
    report.add_table("an arrival where others wait whose deadlines press, median (extremes)", [row])
    report.at_most(f"{ADMISSION}, {PRESSING[0]:,} waiting whose deadlines press", row[ADMISSION].median, 200)
    decoding = [_measure_decodes(rows, what, runs, steps) for rows in (1, *ROWS) for what in (CORE, OBSERVED, LOGGED)]
    report.add_table("the event loop's cost of a step in which all rows decode, median (extremes)", decoding)
    costs = {(row["rows"], row["what"]): row["us a token"].median for row in decoding}
    report.at_most("a step of one row, core alone, us", costs[1, CORE], STEP_OF_ONE)
    for rows, most in ROWS.items():
        report.at_most(f"a token at {rows:,} running, event log on, us", costs[rows, LOGGED], most)
    return report.finish(options.results)


def _measure(waiting: int, tenants: int, runs: int, steps: int) -> dict[str, Any]:
    """A row, in microseconds: of a step without newcomers, of one with a newcomer in every fourth, and of a refusal."""
    steady, turnover, refusals = [], [], []
    for _ in range(runs):
        machine = Machine(waiting, tenants)
        gc.collect()
        gc.freeze()
        steady.append(median(machine.step(ended=0) for _ in range(steps)) * 1e6)
        turnover.append(mean(machine.step(ended=int(n % 4 == 0)) for n in range(steps)) * 1e6)
        refusals.append(median(_refusal_after_a_step(machine, number) for number in range(steps)) * 1e6)
        gc.unfreeze()
    spreads = {STEADY: Spread.of(steady), TURNOVER: Spread.of(turnover), REFUSAL: Spread.of(refusals)}
    return {"waiting": waiting, "tenants": tenants, **spreads}


def _measure_pressing(waiting: int, tenants: int, runs: int, steps: int) -> dict[str, Any]:
    found = []
    for _ in range(runs):
        machine = Machine(0, tenants, slots=NUM_RUNNING + waiting)
        gc.collect()
        gc.freeze()
        found.append(median(_admission_after_a_step(machine, waiting) for _ in range(steps)) * 1e6)
        gc.unfreeze()
    return {"waiting": waiting, "tenants": tenants, ADMISSION: Spread.of(found)}


class Decoding:
    """A loop over steps in which every row decodes, on a clock of its own that counts nanoseconds."""

    def __init__(self, rows: int, what: str) -> None:
        engine = EngineConfig(
            num_blocks=300 * rows,
            max_model_len=4096,
            max_num_seqs=rows,
            max_num_batched_tokens=max(4096, rows),
            prefill_chunk=512,
        )
        config, model = CoreConfig(max_waiting=10**6), StepTimeModel(PRIOR_STEP_TIME)
        self._lines: list[str] = []
        logged = make_logged_core(config, engine, model, self._lines.append)[0] if what == LOGGED else None
        self._core = logged or make_core(config, engine, model)
        if what != CORE:
            metrics = EngineMetrics(Registry(), self._core, dict)
            CoreTelemetry(self._core).on_step.append(metrics.stepped)
        self._random = Random(rows)
        self._ns = 10**13
        self._flying: deque[Batch] = deque()
        self._loop = StepLoop(self._core, self._flying.append, lambda: self._ns / 1e9)
        for n in range(rows):
            prompt = [1] * self._random.randint(20, 300)
            sampling = SamplingParams(temperature=0)
            request = PromptRequest(f"chatcmpl-{n}-0", f"t{n % 50}", prompt, sampling, 3000, 0, frozenset([END]))
            self._core.arrive(Sequence(request), self._ns / 1e9)
        self._loop.schedule()
        while sum(1 for s in self._core.scheduler.running.values() if s.output) < rows:
            self.step()

    def step(self) -> tuple[float, int]:
        """Microseconds of CPU and user instructions for a step from its output to the launch of the next."""
        batch = self._flying.popleft()
        elapsed = round(STEP_NS * self._random.uniform(0.95, 1.05))
        self._ns += elapsed
        output = StepOutput(batch.step, [5] * len(batch.sampled), elapsed / 1e9)
        began, counted = time.thread_time_ns(), instructions()
        self._loop.step(output)
        counted, took = instructions() - counted, time.thread_time_ns() - began
        self._lines.clear()
        return took / 1e3, counted


def _measure_decodes(rows: int, what: str, runs: int, steps: int) -> dict[str, Any]:
    times, counts = [], []
    for _ in range(runs):
        loop = Decoding(rows, what)
        gc.collect()
        gc.freeze()
        found = [loop.step() for _ in range(steps)]
        times.append(median(took for took, _ in found) / rows)
        counts.append(mean(count for _, count in found) / rows)
        gc.unfreeze()
    spreads = {"us a token": Spread.of(times), "instructions a token": Spread.of(counts)}
    return {"rows": rows, "what": what, **spreads}


def _refusal_after_a_step(machine: Machine, number: int) -> float:
    machine.step(ended=int(number % 4 == 0))
    return machine.refuse(number)


def _admission_after_a_step(machine: Machine, waiting: int) -> float:
    machine.step(ended=0)
    return machine.press(waiting)


if __name__ == "__main__":
    sys.exit(main())
