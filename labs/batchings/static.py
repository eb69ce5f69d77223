"""Static batching: a batch admits no sequence until all of it has ended.

With packed prompts, and rows that end with their answers, this is the best case of a static engine; `padding` adds its
real costs. Waived: every sequence that fits joins any step.
"""

from backend.scheduler.batching import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from labs.batchings.padding import Padding
from labs.batchings.running import prefilling


class StaticBatching(BatchingRule):
    """Admits only to an empty batch."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._is_closed = False

    def plan(self, scheduled: ScheduledStep) -> None:
        self._is_closed = bool(self.parts.kv_manager.running or self.parts.in_flight)
        super().plan(scheduled)

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        return WaitReason.BATCH if self._is_closed else None


class PaddedStaticBatching(StaticBatching):
    """Static batching with padding. Waived, too: decodes in steps with prefills."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._padding = Padding(parts.config, parts.kv_manager.running, parts.counters)

    def plan(self, scheduled: ScheduledStep) -> None:
        if prompts := prefilling(self.parts):
            self._is_closed = True
            self.parts.plan_prefills(prompts, scheduled)
        else:
            super().plan(scheduled)
        if scheduled.sequences:
            self._padding.add(scheduled)

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        return self._padding.room(prefilling, room)
