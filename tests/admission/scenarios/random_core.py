"""A whole core on a virtual clock under random arrivals, cancellations and step times, without Hypothesis: fast enough
for a hundred thousand schedules.
"""

from collections import deque
from itertools import count
from random import Random

from admission.core import PRIOR, CoreConfig, MemoryGate, Unit, make_core
from admission.fair_queue import FairQueue
from admission.ledger import work_of
from admission.simulation.fairness_monitor import FairnessMonitor
from admission.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence

BLOCK, END = 4, 1
TRUE = StepTime((4e-3, 1e-4, 3e-5, 1e-6, 1e-7, 1e-8, 1e-4), 24)  # not the prior: what is predicted has to be learned
_SAMPLING, _ENDS = SamplingParams(), frozenset([END])


class RandomCore:
    """Tenants of different weights and sizes of request, on an engine whose memory they overrun."""

    def __init__(self, seed: int, unit: Unit) -> None:
        self.random = random = Random(seed)
        self.engine = _engine(random)
        self.config = _config(random, unit)
        self.core = make_core(self.config, self.engine, StepTimeModel(PRIOR))
        self.scheduler = self.core.scheduler
        queue = self.scheduler.waiting
        assert isinstance(queue, FairQueue)
        self.queue = queue
        self.monitor = FairnessMonitor(
            queue, self.config.quantum, max(self.config.debt_limit, self.config.deadline_debt_limit)
        )
        self.now = 0.0
        self.busy = 0.0
        self.stalls = random.choice([0.0, 0.03])
        self.sequences: list[Sequence] = []  # all that arrived
        self._sizes = {tenant: (random.randint(1, 40), random.randint(1, 24)) for tenant in self.config.weights}
        self._flying: deque[ScheduledStep] = deque()
        self._numbers = count()

    def arrive(self) -> Sequence:
        random = self.random
        tenant = random.choice(list(self._sizes))
        prompt, output = (random.randint(1, most) for most in self._sizes[tenant])
        sequence = Sequence(str(next(self._numbers)), tenant, [0] * prompt, _SAMPLING, output, 0, _ENDS)
        sequence.priority_class = random.choice((0, 1, 1, 2))
        sequence.token_interval = random.choice((None, None, 0.02))
        self.core.arrive(sequence, self.now)
        self.sequences.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.core.finish(sequence, FinishReason.CANCELLED, self.now)
        self.monitor.update()

    def plan(self) -> None:
        """As many steps as may be in flight."""
        while self.core.schedule(self.now) is not None:
            scheduled = self.scheduler.in_flight[-1]
            self._flying.append(scheduled)
            self.monitor.planned(scheduled.admitted)
        for _ in self.core.take_ended():
            self.monitor.update()

    def complete(self) -> None:
        """The oldest step, if one is in flight; it ends a sequence now and then."""
        if not self._flying:
            return
        scheduled, random = self._flying.popleft(), self.random
        elapsed = TRUE.seconds(work_of(scheduled)) * random.uniform(0.8, 1.25)
        if random.random() < self.stalls:
            elapsed *= 10
        self.now += elapsed
        self.busy += elapsed
        tokens = [END if random.random() < 0.04 else 0 for _ in scheduled.sampled]
        self.core.update_from_output(StepOutput(scheduled.batch.step, tokens, elapsed), self.now)
        self.monitor.completed()

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.plan()
            self.complete()

    @property
    def charged(self) -> float:
        return sum(account.charged for account in self.queue.accounts.values())


def _engine(random: Random) -> EngineConfig:
    return EngineConfig(
        num_blocks=random.randint(16, 64),
        max_model_len=16 * BLOCK,
        block_size=BLOCK,
        max_num_seqs=random.randint(2, 10),
        max_num_batched_tokens=random.choice((16, 32, 64)),
        prefill_chunk=random.choice((5, 16)),
        steps_in_flight=random.randint(1, 2),
        max_preemptions=random.choice((1, 8)),
    )


def _config(random: Random, unit: Unit) -> CoreConfig:
    scale = 1.0 if unit is Unit.TOKENS else 1e-3
    return CoreConfig(
        unit=unit,
        quantum=scale * random.choice((1, 8, 64)),
        debt_limit=scale * random.choice((0, 40)),
        deadline_debt_limit=scale * random.choice((0, 40)),
        weights={f"t{n}": random.choice((0.5, 1.0, 2.0)) for n in range(random.randint(2, 4))},
        seconds_per_class=random.choice((0.02, 2.0)),
        memory=random.choice(list(MemoryGate)),
    )
