"""Metrics of the latency estimates sent to clients, and of their coverage."""

from collections import defaultdict
from collections.abc import Iterator

from admission.controller import Controller
from backend.scheduler.sequence import FinishReason
from gateway.telemetry.metrics.labels import OTHER, ClassNames, TenantLabels
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline

ESTIMATE_ERROR = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
WINDOW_ESTIMATES = (100, 300)  # sizes of the windows, in estimates
MIN_ESTIMATES = 50  # in a window, below which no share is shown
MAX_KEPT = 2 * max(WINDOW_ESTIMATES)  # estimates, before all but the newest are forgotten
TOKENS = ("first", "last")
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


class HeldWindows:
    """The newest estimates, and the share that held."""

    def __init__(self) -> None:
        self._held = bytearray()  # the oldest first, 1 for each that held: counted where they are read

    def add(self, held: bool) -> None:
        self._held.append(held)
        if len(self._held) > MAX_KEPT:
            del self._held[: -max(WINDOW_ESTIMATES)]

    def share(self, size: int) -> float:
        """Returns the share of the newest `size` that held; 1 until `MIN_ESTIMATES` are known."""
        newest = self._held[-size:]
        return newest.count(1) / len(newest) if len(newest) >= MIN_ESTIMATES else 1.0


class EstimateMetrics:
    """Compares each ended request with its promised estimates, in all, by class and by tenant."""

    def __init__(self, registry: Registry, core: Controller, classes: ClassNames) -> None:
        self._core, self._classes, self._tenants = core, classes, TenantLabels()
        errors = registry.histogram(
            "sluice.estimate.error",
            "How far tokens came before or after what the client was told.",
            ESTIMATE_ERROR,
            ("token", "side"),
        )
        self._errors = {token: [errors.at(token, side) for side in ("early", "late")] for token in TOKENS}
        coverage = Family("sluice.estimate.coverage", Kind.GAUGE, "1", "Share of the estimates that held.", ("token",))
        registry.read(coverage, self._coverages)
        self._of_classes = defaultdict[tuple[str, str], HeldWindows](HeldWindows)  # by class and token
        self._of_tenants = defaultdict(HeldWindows, {(OTHER, token): HeldWindows() for token in TOKENS})
        by_class = ("class", "token", "window")
        recent = Family("sluice.estimate.recent_coverage", Kind.GAUGE, "1", "Share of the newest that held.", by_class)
        registry.read(recent, self._shares_of_classes)
        by_tenant = ("tenant", "token", "window")
        of_tenants = Family(
            "sluice.tenant.estimate.coverage", Kind.GAUGE, "1", "Share of a tenant's that held.", by_tenant
        )
        registry.read(of_tenants, lambda: _shares(self._of_tenants))

    def ended(self, record: RequestRecord) -> None:
        """Compare the client's estimates with the times of its tokens, or with the end of the request."""
        for timeline in record.engine.timelines:
            for token, told, came in _told(timeline):
                if came is not None:
                    late = came - timeline.queued - told
                    self._errors[token][late > 0].observe(abs(late))
                held = _held(timeline, told, came)
                if held is not None:
                    self._note(timeline, token, held)

    def _note(self, timeline: SequenceTimeline, token: str, held: bool) -> None:
        sequence = timeline.sequence
        self._of_classes[self._classes.of(sequence.request.priority_class), token].add(held)
        self._of_tenants[self._tenants.of(sequence.tenant), token].add(held)

    def _coverages(self) -> list[Point]:
        calibration = self._core.control.calibration
        return [(("first",), calibration.coverage), (("last",), calibration.completion_coverage)]

    def _shares_of_classes(self) -> list[Point]:
        every = {(name, token): HeldWindows() for name in self._classes.all() for token in TOKENS}
        return _shares(every | self._of_classes)


def _told(timeline: SequenceTimeline) -> Iterator[tuple[str, float, float | None]]:
    """Yields each estimated token, its estimate in seconds from arrival, and its time, if it came."""
    promise = timeline.promise
    if promise.first_token is not None:
        yield "first", promise.first_token, timeline.first_token
    if promise.last_token is not None:
        has_answer = timeline.sequence.finish_reason in _ANSWERED
        yield "last", promise.last_token, timeline.ended if has_answer else None


def _held(timeline: SequenceTimeline, told: float, came: float | None) -> bool | None:
    """True if the estimate held; None if the request ended before that was known."""
    if came is not None:
        return came - timeline.queued <= told
    waited = (timeline.ended or timeline.queued) - timeline.queued
    is_given_up = timeline.sequence.finish_reason is FinishReason.EXPIRED and timeline.first_token is None
    return False if waited > told or is_given_up else None


def _shares(windows: dict[tuple[str, str], HeldWindows]) -> list[Point]:
    return [((*key, str(size)), held.share(size)) for key, held in windows.items() for size in WINDOW_ESTIMATES]
