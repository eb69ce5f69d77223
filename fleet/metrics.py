"""Metrics of a router: requests by replica, second attempts, and predictions for each replica."""

from collections.abc import Callable, Iterable

from fleet.fleet import Fleet
from fleet.retries import RetryBudget
from fleet.settlements import Settlements
from fleet.tracing import RouteTracing
from fleet.view import ReplicaView
from gateway.telemetry.metrics.prometheus import exposition_in_turns
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry
from gateway.telemetry.request_record import RequestRecord

FIRST_BYTE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # upper bounds, in seconds


class RouterMetrics:
    """Counts ended requests, and reads the fleet on demand."""

    def __init__(self, fleet: Fleet, budget: RetryBudget) -> None:
        self._fleet = fleet
        self._registry = registry = Registry()
        self._requests = registry.counter("sluice.route.requests", "Requests that have ended.", ("outcome",))
        self._first = registry.histogram("sluice.route.first_byte", "From a request to its answer.", FIRST_BYTE).at()
        registry.total("sluice.route.retries", "Second attempts.", lambda: budget.taken)
        picks = Family("sluice.route.attempts", Kind.COUNTER, "", "Attempts by replica.", ("replica",))
        registry.read(picks, self._of_each(lambda view: view.attempts))
        ejections = Family("sluice.route.ejections", Kind.COUNTER, "", "Times it was left out.", ("replica",))
        registry.read(ejections, self._of_each(lambda view: view.ejection.times))
        now = fleet.clock
        available = Family("sluice.route.available", Kind.GAUGE, "", "Takes new requests: 1.", ("replica",))
        registry.read(available, self._of_each(lambda view: float(view.is_available(now()))))
        load = Family("sluice.route.open_requests", Kind.GAUGE, "", "Not answered to the end.", ("replica",))
        registry.read(load, self._of_each(lambda view: len(view.open)))
        work = Family("sluice.route.work", Kind.GAUGE, "s", "Predicted work, as told.", ("replica",))
        registry.read(work, self._of_each(lambda view: view.state.work_seconds if view.state else 0.0))

    def count_losses(self, tracing: RouteTracing) -> None:
        """Register the losses of traces, under a replica's names."""
        exporter, sampler = tracing.exporter, tracing.sampler
        if exporter is not None:
            self._registry.total(
                "sluice.spans.exported", "Spans that the collector took.", lambda: exporter.num_exported
            )
            self._registry.total("sluice.spans.dropped", "Spans lost on the way.", lambda: exporter.num_dropped)
            self._registry.total("sluice.traces.capped", "Requests not traced: too many.", lambda: sampler.num_capped)

    def count_settlements(self, settlements: Settlements) -> None:
        """Register the settlements of lost replicas' requests."""
        family = Family("sluice.route.settlements", Kind.COUNTER, "", "Requests of lost replicas.", ("result",))
        read = settlements
        self._registry.read(family, lambda: [(("settled",), read.num_settled), (("left",), read.num_left)])

    def ended(self, record: RequestRecord) -> None:
        if record.outcome is not None:
            self._requests[record.outcome,].value += 1
        if record.first_byte is not None and record.tenant is not None:
            self._first.observe(record.first_byte - record.began)

    async def text(self) -> bytes:
        """Returns every metric in Prometheus' text format, as of the call."""
        return await exposition_in_turns(self._registry.collect())

    def _of_each(self, value: Callable[[ReplicaView], float]) -> Callable[[], Iterable[Point]]:
        return lambda: [((name,), value(view)) for name, view in self._fleet.views.items()]
