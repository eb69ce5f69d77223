"""Metrics of the queue for the engine: what waits, for how long, and how well the estimates held."""

from collections.abc import Callable

from admission.controller import Controller
from backend.scheduler.sequence import FinishReason
from gateway.telemetry.metrics.labels import ClassNames
from gateway.telemetry.metrics.registry import Family, HistogramSeries, Kind, Labelled, Point, Registry
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline

_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)

# upper bounds of buckets, in seconds
QUEUE_TIME = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ESTIMATE_ERROR = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class QueueMetrics:
    def __init__(self, registry: Registry, core: Controller, classes: ClassNames, clock: Callable[[], float]) -> None:
        self._core, self._classes, self._clock = core, classes, clock
        label = ("class",)
        depth = Family("sluice.queue.depth", Kind.GAUGE, "", "Sequences that wait for the engine.", label)
        oldest = Family("sluice.queue.oldest_age", Kind.GAUGE, "s", "How long the oldest of them waits.", label)
        registry.read(depth, self._depths)
        registry.read(oldest, self._ages)
        self._times = registry.histogram(
            "sluice.queue.time", "From arrival to first step, of those admitted.", QUEUE_TIME, label
        )
        self._admissions = registry.counter("sluice.admissions", "Sequences taken into a first step.", label)
        self._promotions = registry.counter(
            "sluice.promotions", "Sequences admitted before a more urgent one of their tenant, by aging.", label
        )
        registry.total(
            "sluice.deferrals", "Sequences let wait longer than their class is meant to.", lambda: core.control.deferred
        )
        self._errors = registry.histogram(
            "sluice.estimate.error",
            "How far tokens came before or after what the client was told.",
            ESTIMATE_ERROR,
            ("token", "side"),
        )
        coverage = Family("sluice.estimate.coverage", Kind.GAUGE, "1", "Share of the estimates that held.", ("token",))
        registry.read(coverage, self._coverages)
        self._begin()
        self._admitted: list[SequenceTimeline] = []  # and not counted yet: that has time until somebody looks
        self.admitted = self._admitted.append
        registry.before.append(self._count_admissions)

    def _count_admissions(self) -> None:
        """Count those that have joined a first step since the last time."""
        for timeline in self._admitted:
            name = self._classes.of(timeline.sequence.priority_class)
            self._admissions.at(name).value += 1
            self._times.at(name).observe((timeline.admitted or timeline.queued) - timeline.queued)
            self._promotions.at(name).value += timeline.was_promoted
        self._admitted.clear()

    def ended(self, record: RequestRecord) -> None:
        """Compare the estimates that the client was sent with when its tokens came."""
        self._count_admissions()
        for timeline in record.timelines:
            sequence = timeline.sequence
            if sequence.first_token_estimate is not None and timeline.first_token is not None:
                _observe(self._errors, "first", timeline.first_token - timeline.queued - sequence.first_token_estimate)
            if (
                sequence.last_token_estimate is not None
                and timeline.ended is not None
                and sequence.finish_reason in _ANSWERED
            ):
                _observe(self._errors, "last", timeline.ended - timeline.queued - sequence.last_token_estimate)

    def _begin(self) -> None:
        """Make all series, so that they are there from the start."""
        for name in self._classes.all():
            self._times.at(name)
            self._admissions.at(name)
            self._promotions.at(name)
        for token in ("first", "last"):
            for side in ("early", "late"):
                self._errors.at(token, side)

    def _depths(self) -> list[Point]:
        backlog = self._core.backlog
        return [((name,), backlog.of_class(level).count) for level, name in enumerate(self._classes.all())]

    def _ages(self) -> list[Point]:
        now, backlog = self._clock(), self._core.backlog
        arrivals = [(name, backlog.oldest(level)) for level, name in enumerate(self._classes.all())]
        return [((name,), 0.0 if arrival is None else max(0.0, now - arrival)) for name, arrival in arrivals]

    def _coverages(self) -> list[Point]:
        calibration = self._core.control.calibration
        return [(("first",), calibration.coverage), (("last",), calibration.completion_coverage)]


def _observe(errors: Labelled[HistogramSeries], token: str, late: float) -> None:
    errors.at(token, "late" if late > 0 else "early").observe(abs(late))
