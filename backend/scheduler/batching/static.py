"""Static batching: a batch admits no sequence until all of it has ended.

With packed prompts, and rows that end with their answers, this is the best case of a static engine; `padding` adds its
real costs. Waived: every sequence that fits joins any step.
"""

from backend.scheduler.batching.padding import Padding
from backend.scheduler.batching.rule import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence


class StaticBatching(BatchingRule):
    """Admits only to an empty batch."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._is_closed = False

    def plan(self, scheduled: ScheduledStep) -> None:
        self._is_closed = bool(self.parts.running or self.parts.in_flight)
        super().plan(scheduled)

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        return WaitReason.BATCH if self._is_closed else None


class PaddedStaticBatching(StaticBatching):
    """Static batching with padding. Waived, too: decodes in steps with prefills."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._padding = Padding(parts.config, parts.running, parts.counters)

    def plan(self, scheduled: ScheduledStep) -> None:
        if prefilling := self.parts.prefilling():
            self._is_closed = True
            self.parts.plan_prefills(prefilling, scheduled)
        else:
            super().plan(scheduled)
        if scheduled.sequences:
            self._padding.add(scheduled)

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        return self._padding.room(prefilling, room)
