"""Metrics of the engine's queue: its depth and its waiting times."""

from collections.abc import Callable

from admission.controller import Controller
from gateway.telemetry.metrics.labels import ClassNames
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline

# upper bounds of buckets, in seconds
QUEUE_TIME = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


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
        self._begin()
        self._admitted: list[SequenceTimeline] = []  # not yet counted: deferred until the metrics are read
        self.admitted = self._admitted.append
        registry.before.append(self._count_admissions)

    def _count_admissions(self) -> None:
        """Count sequences that joined their first step since the last call."""
        for timeline in self._admitted:
            name = self._classes.of(timeline.sequence.request.priority_class)
            self._admissions[name,].value += 1
            self._times[name,].observe((timeline.admitted or timeline.queued) - timeline.queued)
            self._promotions[name,].value += timeline.was_promoted
        self._admitted.clear()

    def ended(self, record: RequestRecord) -> None:
        """Count admissions before the list grows long."""
        if self._admitted:
            self._count_admissions()

    def _begin(self) -> None:
        """Create all series, so that they exist from the start."""
        for name in self._classes.all():
            self._times.at(name)
            self._admissions.at(name)
            self._promotions.at(name)

    def _depths(self) -> list[Point]:
        backlog = self._core.backlog
        return [((name,), backlog.of_class(level).count) for level, name in enumerate(self._classes.all())]

    def _ages(self) -> list[Point]:
        now, backlog = self._clock(), self._core.backlog
        arrivals = [(name, backlog.oldest(level)) for level, name in enumerate(self._classes.all())]
        return [((name,), 0.0 if arrival is None else max(0.0, now - arrival)) for name, arrival in arrivals]
