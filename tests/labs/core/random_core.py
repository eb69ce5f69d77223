"""A whole core on a virtual clock under random arrivals, cancellations and step times, without Hypothesis: fast enough
for a hundred thousand schedules.
"""

from collections.abc import Collection
from itertools import count
from random import Random

from admission.core import CoreConfig, MemoryGate, make_core
from backend.config import EngineConfig
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence
from labs.simulation.fairness_monitor import FairnessMonitor
from tests.admission.clocked_core import ClockedCore
from tests.admission.staged_core import true_seconds
from tests.backend.sequences import make_sequence

BLOCK = 4


class RandomCore(ClockedCore):
    """Tenants of different weights and sizes of request, on an engine whose memory they overrun."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.engine = _engine(random)
        self.config = _config(random)
        super().__init__(make_core(self.config, self.engine), self._took)
        self.queue = self.scheduler.waiting
        self.monitor = FairnessMonitor(self.core)
        self.busy = 0.0
        self.stalls = random.choice([0.0, 0.03])
        self.sequences: list[Sequence] = []  # all that arrived
        self._sizes = {tenant: (random.randint(1, 40), random.randint(1, 24)) for tenant in self.config.weights}
        self._numbers = count()

    def arrive(self) -> Sequence:
        random = self.random
        tenant = random.choice(list(self._sizes))
        prompt, output = (random.randint(1, most) for most in self._sizes[tenant])
        sequence = make_sequence(
            str(next(self._numbers)),
            tenant,
            prompt,
            output,
            priority_class=random.choice((0, 1, 1, 2)),
            token_interval=random.choice((None, None, 0.02)),
            first_token_target=random.choice((1e-4, 2e-3)),
        )
        self.sequences.append(self.add(sequence))
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        super().finish(sequence, reason)
        self.monitor.update()

    def plan(self) -> list[Sequence]:
        given_up = super().plan()
        for _ in given_up:
            self.monitor.update()
        return given_up

    def launch(self, step: ScheduledStep) -> None:
        super().launch(step)
        self.monitor.planned(step.admitted)

    def complete(self, ended: Collection[str] = ()) -> None:
        """The oldest step, if one is in flight; it ends a sequence now and then."""
        if self.launched:
            sampled = self.launched[0].sampled
            super().complete([sequence.id for sequence in sampled if self.random.random() < 0.04])
            self.busy += self.elapsed
            self.monitor.completed()

    def _took(self, step: ScheduledStep) -> float:
        stall = 10 if self.random.random() < self.stalls else 1
        return true_seconds(step, self.random) * stall

    @property
    def charged(self) -> float:
        return sum(account.charged for account in self.core.share.accounts.values())


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


def _config(random: Random) -> CoreConfig:
    return CoreConfig(
        weights={f"t{n}": random.choice((0.5, 1.0, 2.0)) for n in range(random.randint(2, 4))},
        burst_s=random.choice((0.01, 0.03)),
        seconds_per_class=random.choice((1e-4, 5e-3)),
        memory=random.choice(list(MemoryGate)),
    )
