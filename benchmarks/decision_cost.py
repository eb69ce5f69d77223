"""What deciding costs beside a step: python -m benchmarks.decision_cost

256 sequences run, others wait; some end each step and the next of the queue are admitted. Planning and accounting are
timed with everything they call: the fair queue, the ledger, the step-time model, the forecast of memory. So is a
refusal, of a request that cannot be in time: from its arrival, after a step that changed something, to the exception
that says why not; every other one has a long prompt, whose age bonus is weighed as well.
"""

import gc
import sys
import time
from collections import deque
from statistics import mean, median
from typing import Any

from admission.controller import Controller
from admission.core import CoreConfig, make_core
from admission.outcome import DeadlineInfeasible
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import Sequence
from benchmarks.report import Report, Spread, scenario_parser

RUNNING = 256
STEP = 7.4e-3  # seconds, of an 8B model on a large GPU at this batch
END = 3
STEADY, TURNOVER = "nobody joins, us", "one joins in four steps, us"
REFUSAL = "deciding a refusal, us"
HOPELESS = 0.01  # seconds in which a refused request wants its first token
PROMPTS = (200, 800)  # tokens of refused requests, by turns
SMALL, LARGE = (1_000, 50), (100_000, 1_000)  # waiting, tenants


class Machine:
    """A core with a full batch, stepped on a clock of its own."""

    def __init__(self, waiting: int, tenants: int) -> None:
        engine = EngineConfig(
            num_blocks=60_000,
            max_model_len=4096,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=2048,
            prefill_chunk=512,
        )
        self.core: Controller = make_core(CoreConfig(max_waiting=10**6), engine)
        self._tenants = tenants
        self._flying: deque[Batch] = deque()
        self._now = 0.0
        prompt = [1] * 200
        for n in range(RUNNING + waiting):
            self._now += 1e-5
            sampling = SamplingParams(temperature=0)
            self.core.arrive(
                Sequence(str(n), f"t{n % tenants}", prompt, sampling, 2000, 0, frozenset([END])), self._now
            )
        while sum(1 for s in self.core.scheduler.running.values() if s.output) < RUNNING:
            self.step(ended=0)

    def step(self, ended: int) -> float:
        """Plan one step and account for another in which `ended` sequences end; seconds of deciding."""
        self._now += STEP
        start = time.perf_counter()
        while (batch := self.core.schedule(self._now)) is not None:
            self._flying.append(batch)
        planned = time.perf_counter()
        oldest = self._flying.popleft()
        tokens = [END if row < ended else 5 for row in range(len(oldest.sampled))]
        output = StepOutput(oldest.step, tokens, STEP)
        completing = time.perf_counter()
        self.core.update_from_output(output, self._now)
        return planned - start + time.perf_counter() - completing

    def refuse(self, number: int) -> float:
        """Seconds of deciding that a newcomer would be too late."""
        hopeless = Sequence(
            f"hopeless {number}",
            f"t{number % self._tenants}",
            [1] * PROMPTS[number % len(PROMPTS)],
            SamplingParams(temperature=0),
            2000,
            0,
            frozenset([END]),
            first_token_by=self._now + HOPELESS,
        )
        start = time.perf_counter()
        try:
            self.core.arrive(hopeless, self._now)
        except DeadlineInfeasible:
            return time.perf_counter() - start
        raise AssertionError("a hopeless request was admitted")


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=5).parse_args(arguments)
    runs, steps = (1, 40) if options.quick else (options.runs, 400)
    report = Report("decision_cost", options.quick)
    small, large = (_measure(*crowd, runs, steps) for crowd in (SMALL, LARGE))
    report.add_table(f"a step and a refusal at {RUNNING} running, median (extremes)", [small, large])
    cost, grown = (row[TURNOVER].median for row in (small, large))
    report.at_most(f"share of a {STEP * 1e3:g} ms step at 1,000 waiting, 50 tenants", cost / 1e6 / STEP, 0.05)
    report.at_most("growth to 100,000 waiting, 1,000 tenants", grown / cost, 1.5)
    for (_, tenants), row in zip((SMALL, LARGE), (small, large), strict=True):
        report.at_most(f"{REFUSAL}, {tenants:,} tenants", row[REFUSAL].median, 200)
    return report.finish(options.results)


def _measure(waiting: int, tenants: int, runs: int, steps: int) -> dict[str, Any]:
    """A row, in microseconds: of a step when nobody joins and when somebody does in every fourth, and of a refusal."""
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


def _refusal_after_a_step(machine: Machine, number: int) -> float:
    machine.step(ended=int(number % 4 == 0))
    return machine.refuse(number)


if __name__ == "__main__":
    sys.exit(main())
