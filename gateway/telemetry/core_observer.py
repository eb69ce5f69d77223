"""The core, watched: what it decides is noted as it passes, and nothing is changed."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from admission.controller import Controller
from admission.event_log import RecordedCore
from admission.ledger import work_of
from admission.request import Asked
from admission.scheduling_policy import SchedulingPolicy
from admission.step_time import StepTimeModel
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.scheduled_step import Delta, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence
from gateway.telemetry.request_record import Chunk, SequenceTimeline

Event = TypeVar("Event")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CompletedStep:
    """One completed step; nobody changes it. Moments in seconds of the engine's clock, durations in seconds."""

    scheduled: ScheduledStep
    planned: float
    completed: float
    elapsed: float  # of the device
    planning: float  # of the event loop

    @property
    def num_sequences(self) -> int:
        return len(self.scheduled.batch.slots)

    @property
    def num_decodes(self) -> int:
        return self.scheduled.batch.num_decodes

    @property
    def prefill_tokens(self) -> int:
        batch = self.scheduled.batch
        return sum(batch.lengths[batch.num_decodes :])


class WatchedCore:
    """Implements `backend.engine.Core` around another. Work is done for what changes, not for each row of each step."""

    def __init__(
        self,
        core: Controller | RecordedCore,
        clock: Callable[[], float] = time.perf_counter,
        step_time: StepTimeModel | None = None,
    ) -> None:
        """`clock` times the planning, in seconds."""
        self.core = core
        self.scheduler = core.scheduler
        self.lengths = core.lengths
        self.room = core.room
        self.on_asked: list[Callable[[Asked, float], object]] = []  # of an HTTP request, once its limits were asked
        self.on_admit: list[Callable[[SequenceTimeline], object]] = []  # for the first time
        self.on_step: list[Callable[[CompletedStep], object]] = []
        self.on_release: list[Callable[[SequenceTimeline], object]] = []  # of the blocks of one that was cut short
        self._clock = clock
        self._step_time = step_time
        self._timelines: dict[Sequence, SequenceTimeline] = {}  # of sequences that wait or run
        self._releasing: list[SequenceTimeline] = []  # ended, named by a step in flight
        self._planned: deque[tuple[float, float]] = deque()  # of the steps in flight: when, and how long it took

    def timeline(self, sequence: Sequence) -> SequenceTimeline:
        """Of a sequence that has been queued; a new one for what never passed here."""
        return self._timelines.get(sequence) or SequenceTimeline(sequence, sequence.arrival)

    def predicted(self, scheduled: ScheduledStep) -> float:
        """Seconds that the device is expected to take for a step; 0.0 where nobody knows."""
        return self._step_time.fitted.seconds(work_of(scheduled)) if self._step_time is not None else 0.0

    @property
    def step_time(self) -> StepTimeModel | None:
        """None: nobody learns it."""
        return self._step_time

    def asked(self, asked: Asked, now: float) -> None:
        self.core.asked(asked, now)
        for tell in self.on_asked:
            tell(asked, now)

    def arrive(self, sequence: Sequence, now: float) -> None:
        self.core.arrive(sequence, now)
        self._timelines[sequence] = SequenceTimeline(sequence, now)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.core.finish(sequence, reason, now)
        self._ended(sequence, now)

    def plan(self, now: float) -> Batch | None:
        if self.scheduler.is_full:
            return None
        began = self._clock()
        batch = self.core.plan(now)
        if batch is not None:
            self._planned.append((now, self._clock() - began))
            self._note_plan(self.scheduler.in_flight[-1], now)
        self._note_preempted(now)
        return batch

    def complete(self, output: StepOutput, now: float) -> list[Delta]:
        scheduled = self.scheduler.in_flight[0]
        deltas = self.core.complete(output, now)
        self._note_tokens(scheduled, deltas, now)
        planned, planning = self._planned.popleft()
        _tell(self.on_step, CompletedStep(scheduled, planned, now, output.elapsed, planning))
        return deltas

    def lost(self, now: float) -> bool:
        step = self.scheduler.in_flight[0].batch.step
        feasible = self.core.lost(now)
        self._planned.clear()
        self._forget_from(step)
        self._note_preempted(now)
        self._note_releases(now)
        return feasible

    def take_ended(self) -> list[Sequence]:
        ended = self.core.take_ended()
        for sequence in ended:
            self._ended(sequence, self.scheduler.holdings.now)
        return ended

    def allow(self, tenant: str, blocks: int | None, now: float) -> None:
        self.core.allow(tenant, blocks, now)

    def extend(self, sequence: Sequence, tokens: int, now: float) -> None:
        self.core.extend(sequence, tokens, now)

    def policy_changed(self, terms: SchedulingPolicy, now: float) -> None:
        self.core.policy_changed(terms, now)

    def _note_plan(self, scheduled: ScheduledStep, now: float) -> None:
        batch, decodes = scheduled.batch, scheduled.batch.num_decodes
        for sequence in scheduled.admitted:
            if (timeline := self._timelines.get(sequence)) is not None:
                if timeline.admitted is None:
                    timeline.admitted, timeline.standing = now, self.core.standing(sequence.tenant)
                    _tell(self.on_admit, timeline)
                else:
                    timeline.resumed.append(now)
        for row in range(decodes, len(batch.slots)):
            if (timeline := self._timelines.get(scheduled.sequences[row])) is not None:
                timeline.chunks.append(Chunk(batch.step, batch.starts[row], batch.lengths[row], now))

    def _forget_from(self, step: int) -> None:
        """This step and those after it did not take place."""
        for timeline in (*self._timelines.values(), *self._releasing):
            while timeline.chunks and timeline.chunks[-1].step >= step:
                timeline.chunks.pop()

    def _note_preempted(self, now: float) -> None:
        for sequence in self.scheduler.preempted:
            if (timeline := self._timelines.get(sequence)) is not None:
                timeline.preempted.append(now)

    def _note_tokens(self, scheduled: ScheduledStep, deltas: list[Delta], now: float) -> None:
        for sequence in scheduled.sampled[scheduled.batch.num_decodes :]:
            timeline = self._timelines.get(sequence)
            if timeline is not None:
                timeline.prefilled = now
                if len(sequence.output) == 1:
                    timeline.first_token = now
        for sequence, _, reason in deltas:
            if reason is not None:
                self._ended(sequence, now)
        if self._releasing:
            self._note_releases(now)

    def _ended(self, sequence: Sequence, now: float) -> None:
        timeline = self._timelines.pop(sequence, None)
        if timeline is None:
            return
        timeline.ended = now
        if sequence.slot < 0:
            self._released(timeline, now)
        else:
            self._releasing.append(timeline)

    def _note_releases(self, now: float) -> None:
        held, self._releasing = self._releasing, []
        for timeline in held:
            if timeline.sequence.slot < 0:
                self._released(timeline, now)
            else:
                self._releasing.append(timeline)

    def _released(self, timeline: SequenceTimeline, now: float) -> None:
        timeline.released = now
        _tell(self.on_release, timeline)


def _tell(listeners: list[Callable[[Event], object]], event: Event) -> None:
    """A listener that fails is logged, and stops neither the others nor the engine."""
    for tell in listeners:
        try:
            tell(event)
        except Exception:
            log.exception("a listener of the core failed")
