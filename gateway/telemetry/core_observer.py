"""Observes the core for telemetry: it keeps the timeline of each sequence and reports each completed step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from admission.controller import Controller
from admission.observer import CoreObserver
from admission.outcome import AdmissionRefused
from admission.promise import Promise
from admission.request import JudgedRequest
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence
from gateway.telemetry.request_record import Chunk, SequenceTimeline, current

Event = TypeVar("Event")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CompletedStep:
    """One completed step."""

    scheduled: ScheduledStep
    completed: float  # seconds of the engine's clock
    elapsed: float  # seconds of the device

    @property
    def num_decodes(self) -> int:
        """The rows that continue an answer by a token or a draft."""
        return self.scheduled.batch.num_decodes + len(self.scheduled.drafts)

    @property
    def decode_tokens(self) -> int:
        return self.num_decodes + sum(self.scheduled.drafts.values())

    @property
    def prefill_tokens(self) -> int:
        return sum(self.scheduled.batch.lengths) - self.decode_tokens


class CoreTelemetry(CoreObserver):
    """Keeps the timelines of sequences, and notifies listeners of admissions, steps and releases.

    The limits asked of a tenant go into the record of the request. The work is proportional to changes, not to the rows
    of every step.
    """

    def __init__(self, core: Controller) -> None:
        """Add itself to the observers of `core`."""
        self.core = core
        self.on_admit: list[Callable[[SequenceTimeline], object]] = []  # called at a sequence's first admission
        self.on_step: list[Callable[[CompletedStep], object]] = []
        self.on_release: list[Callable[[SequenceTimeline], object]] = []  # once an ended sequence's blocks are free
        self._timelines: dict[Sequence, SequenceTimeline] = {}  # of queued and running sequences
        self._releasing: list[SequenceTimeline] = []  # of ended sequences named by a step in flight
        core.observers.append(self)

    def timeline(self, sequence: Sequence) -> SequenceTimeline:
        """The timeline of a sequence; a new one if the core never reported it."""
        return self._timelines.get(sequence) or SequenceTimeline(sequence, Promise(), sequence.arrival)

    def requested(self, asked: JudgedRequest, now: float) -> None:
        if (record := current.get()) is not None:
            record.engine.asked, record.engine.asked_at = asked, now

    def arrived(self, sequence: Sequence, answer: Promise | AdmissionRefused, now: float) -> None:
        if isinstance(answer, Promise):
            self._timelines[sequence] = SequenceTimeline(sequence, answer, now)

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._ended(sequence, now)

    def gave_up(self, sequence: Sequence, now: float) -> None:
        self._ended(sequence, now)

    def scheduled(self, step: ScheduledStep | None, now: float) -> None:
        if step is not None and (step.admitted or step.batch.num_decodes < len(step.batch.slots)):
            self._note_plan(step, now)
        if self.core.scheduler.preempted:
            self._note_preempted(now)

    def updated(self, step: ScheduledStep, output: StepOutput, now: float) -> None:
        self._note_tokens(step, now)
        _notify(self.on_step, CompletedStep(step, now, output.elapsed))

    def rolled_back(self, step: ScheduledStep, now: float) -> None:
        self._forget_from(step.batch.step)
        self._note_preempted(now)
        self._note_releases(now)

    def _note_plan(self, scheduled: ScheduledStep, now: float) -> None:
        batch, decodes = scheduled.batch, scheduled.batch.num_decodes
        for sequence in scheduled.admitted:
            if (timeline := self._timelines.get(sequence)) is not None:
                if timeline.admitted is None:
                    timeline.admitted, timeline.credit = now, self.core.credit(sequence.tenant)
                    most_urgent = self.core.backlog.most_urgent(sequence.tenant)
                    timeline.was_promoted = most_urgent is not None and most_urgent < sequence.request.priority_class
                    _notify(self.on_admit, timeline)
                else:
                    timeline.resumed.append(now)
        for row in range(decodes, len(batch.slots)):
            sequence = scheduled.sequences[row]
            if (timeline := self._timelines.get(sequence)) is not None and sequence not in scheduled.drafts:
                timeline.chunks.append(Chunk(batch.step, batch.starts[row], batch.lengths[row], now))

    def _forget_from(self, step: int) -> None:
        """Remove the chunks of this step and of later ones, which did not take place."""
        for timeline in (*self._timelines.values(), *self._releasing):
            while timeline.chunks and timeline.chunks[-1].step >= step:
                timeline.chunks.pop()

    def _note_preempted(self, now: float) -> None:
        for sequence in self.core.scheduler.preempted:
            if (timeline := self._timelines.get(sequence)) is not None:
                timeline.preempted.append(now)

    def _note_tokens(self, scheduled: ScheduledStep, now: float) -> None:
        for sequence in scheduled.sampled[scheduled.batch.num_decodes :]:
            timeline = self._timelines.get(sequence)
            if timeline is not None and sequence not in scheduled.drafts:
                timeline.prefilled = now
                if scheduled.has_brought_first(sequence):
                    timeline.first_token = now
        for sequence, count in scheduled.jumped.items():
            if (timeline := self._timelines.get(sequence)) is not None and sequence not in scheduled.drafts:
                timeline.num_jumped_tokens += count
        for sequence, _ in scheduled.ended:
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
        _notify(self.on_release, timeline)


def _notify(listeners: list[Callable[[Event], object]], event: Event) -> None:
    """Call each listener; the failure of one is logged and stops neither the others nor the engine."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            log.exception("a listener of the core failed")
