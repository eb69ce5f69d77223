"""The same run in other words: tenants with other names, a clock set elsewhere, all weights doubled."""

from collections.abc import Mapping
from dataclasses import replace

from admission.core import PRIOR, CoreConfig
from admission.event_log import make_logged_core
from admission.outcome import QueueFull
from admission.step_time import StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import FinishReason, Sequence

SHIFT = 4096.0  # seconds; exact in floating point, as long as times are multiples of a power of two
SCALE = 2.0


class Twin:
    """A core of its own, told what another core is told. `names` has the other name of each tenant."""

    def __init__(self, config: CoreConfig, engine: EngineConfig, names: Mapping[str, str]) -> None:
        weights = {names[tenant]: SCALE * weight for tenant, weight in config.weights.items()}
        self._core = make_logged_core(
            replace(config, weights=weights), engine, StepTimeModel(PRIOR), lambda line: None
        )[0]
        self._names = names
        self._sequences: dict[str, Sequence] = {}

    def arrive(self, original: Sequence, now: float) -> bool:
        """Whether it was let in."""
        fields = (original.prompt, original.sampling, original.max_tokens, original.seed, original.end_tokens)
        sequence = Sequence(original.id, self._names[original.tenant], *fields)
        sequence.priority_class, sequence.token_interval = original.priority_class, original.token_interval
        try:
            self._core.arrive(sequence, now + SHIFT)
        except QueueFull:
            return False
        self._sequences[original.id] = sequence
        return True

    def finish(self, original: Sequence, reason: FinishReason, now: float) -> None:
        self._core.finish(self._sequences[original.id], reason, now + SHIFT)

    def plan(self, now: float) -> Batch | None:
        return self._core.schedule(now + SHIFT)

    def take_ended(self) -> list[str]:
        return [sequence.id for sequence in self._core.take_ended()]

    def lost(self, now: float) -> bool:
        return self._core.rollback(now + SHIFT)

    def complete(self, output: StepOutput, now: float) -> list[tuple[str, int, FinishReason | None]]:
        new_tokens = self._core.update_from_output(output, now + SHIFT)
        return [(sequence.id, token, reason) for sequence, token, reason in new_tokens]
