"""A recorded core runs on a virtual clock, over a device that only takes time and draws the tokens it is told to."""

from collections import deque
from collections.abc import Collection
from random import Random
from typing import Any

from admission.core import PRIOR, CoreConfig
from admission.event_log import make_logged_core
from admission.ledger import work_of
from admission.outcome import AdmissionRefused
from admission.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence

TRUE = StepTime((4e-3, 1e-4, 3e-5, 1e-6, 1e-7, 1e-8, 1e-4), 24)  # not the prior: what is predicted has to be learned
START = 1000.0  # seconds of the engine's clock
END = 1
SMALL = {
    "num_blocks": 40,
    "max_model_len": 64,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "prefill_chunk": 16,
}


class StagedCore:
    """Events are methods; the lines of its log are in `lines`. The same calls give the same lines on any machine."""

    def __init__(self, config: CoreConfig, seed: int = 0, prior: StepTimeModel | None = None, **engine: Any) -> None:
        """`engine`: fields of an `EngineConfig` that differ from those of `SMALL`."""
        self.lines: list[str] = []
        self.engine = EngineConfig(**(SMALL | engine))
        model = prior or StepTimeModel(PRIOR)
        self.core, self.log = make_logged_core(config, self.engine, model, self.lines.append)
        self.scheduler = self.core.scheduler
        self.random = Random(seed)
        self.now = START
        self._flying: deque[ScheduledStep] = deque()

    @property
    def in_flight(self) -> int:
        """The number of steps that were planned and not completed."""
        return len(self._flying)

    def arrive(
        self, name: str, prompt: int = 8, output: int = 8, tenant: str = "a", may_have: int | None = None, **fields: Any
    ) -> Sequence:
        """`may_have`: the tokens of the answer that it may generate at first. Raises `AdmissionRefused`."""
        most = min(output, self.engine.max_model_len - prompt)
        sequence = Sequence(name, tenant, [0] * prompt, SamplingParams(), most, 0, frozenset([END]), **fields)
        if may_have is not None:
            sequence.limit_to(may_have)
        self.core.arrive(sequence, self.now)
        return sequence

    def refused(self, name: str, prompt: int = 8, **fields: Any) -> AdmissionRefused:
        """Returns why a newcomer is refused, which must not be let in."""
        try:
            self.arrive(name, prompt, **fields)
        except AdmissionRefused as refusal:
            return refusal
        raise AssertionError(f"{name} was let in")

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.core.finish(sequence, reason, self.now)

    def allow(self, tenant: str, blocks: int | None) -> None:
        self.core.allow(tenant, blocks, self.now)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        self.core.extend(sequence, tokens, self.now)

    def plan(self) -> list[Sequence]:
        """Plan as many steps as may be in flight; returns who was given up."""
        while self.core.schedule(self.now) is not None:
            self._flying.append(self.scheduler.in_flight[-1])
        return self.core.take_ended()

    def complete(self, stopped: Collection[str] = ()) -> None:
        """Complete the oldest step, in which those whose ids are given draw the token that ends them."""
        scheduled = self._flying.popleft()
        elapsed = TRUE.seconds(work_of(scheduled)) * self.random.uniform(0.8, 1.25)
        self.now += elapsed
        tokens = [END if sequence.id in stopped else 0 for sequence in scheduled.sampled]
        self.core.update_from_output(StepOutput(scheduled.batch.step, tokens, elapsed), self.now)

    def lose(self) -> None:
        """Let the device have no memory for the oldest step."""
        self._flying.clear()
        self.core.rollback(self.now)

    def step(self, *stopped: str) -> list[Sequence]:
        """Plan, and complete the oldest step; returns who was given up."""
        given_up = self.plan()
        if self._flying:
            self.complete(stopped)
        return given_up

    def run(self) -> list[str]:
        """Serve until nothing can run any more; returns the lines of the log."""
        while self.scheduler.has_work:
            self.plan()
            if not self._flying:
                break
            self.complete()
        return self.lines
