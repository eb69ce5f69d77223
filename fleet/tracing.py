"""Makes the trace of one request through a router when it has ended:

    route                               SERVER; below the client's span
    ├── attempt                         CLIENT; an event first_byte once its answer begins
    │   └── POST /v1/chat/completions   the replica's own trace
    └── attempt                         the second, at another replica, and why there was one

Trace context reaches the replica with the attempt's span as the parent, and the client's `tracestate`; baggage passes
as it is. Without a collector nothing is made, and all headers pass as they are.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import getrandbits
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind

from fleet.view import ReplicaView
from gateway.settings.settings import Settings
from gateway.telemetry.otlp import Collector, resource
from gateway.telemetry.request_record import RequestRecord, Telemetry, TraceContext, current
from gateway.telemetry.tracing.exporter import BackgroundExporter, background_exporter
from gateway.telemetry.tracing.http_attributes import of_http
from gateway.telemetry.tracing.sampler import SamplingReason, TraceSampler
from gateway.telemetry.tracing.span_tree import Attributes, SpanTree

_CARRIED = (b"traceparent", b"tracestate")

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True, eq=False)
class AttemptSpan:
    """One attempt of a request; moments are of the router's clock."""

    replica: str  # its name
    number: int  # the first is 1
    predicted: float | None  # seconds until the first token
    because: str | None  # the reason of a second attempt, in one word
    began: float
    span_id: int
    first_byte: float | None = None
    ended: float | None = None
    status: int | None = None  # of its answer
    error: str | None = None  # the reason of its failure, in one word


class RouteTracing:
    """Keeps the attempts of live requests, and makes the spans of sampled ones."""

    def __init__(
        self,
        clock: Callable[[], float],
        exporter: BackgroundExporter | None = None,
        sampler: TraceSampler | None = None,
        origin: Resource | None = None,
    ) -> None:
        """Without an exporter nothing is kept and no header is changed."""
        self.exporter = exporter
        self.sampler = sampler or TraceSampler(0.0, 1.0, 1.0, waited)
        self._clock = clock
        self._origin = origin or Resource.get_empty()
        self._attempts: dict[RequestRecord, list[AttemptSpan]] = {}

    @contextmanager
    def attempt(
        self, view: ReplicaView, number: int, predict: Callable[[], float], because: str | None
    ) -> Iterator[AttemptSpan]:
        """Record an attempt of the running task's request at a replica, while the block runs; the caller fills in its
        result.
        """
        record = current.get()
        predicted = None if self.exporter is None else predict()
        span = AttemptSpan(view.name, number, predicted, because, self._clock(), getrandbits(64) or 1)
        if self.exporter is not None and record is not None:
            self._attempts.setdefault(record, []).append(span)
        try:
            yield span
        finally:
            span.ended = self._clock()

    def carried(self, headers: Iterable[tuple[bytes, bytes]], span: AttemptSpan) -> Iterable[tuple[bytes, bytes]]:
        """The headers by which a replica continues the trace below an attempt."""
        record = current.get()
        if self.exporter is None or record is None:
            return headers
        trace = record.trace
        kept = [(name, value) for name, value in headers if name not in _CARRIED]
        flags = b"01" if self._is_sampled(trace) else b"00"
        kept.append((b"traceparent", b"00-%032x-%016x-%b" % (trace.trace_id, span.span_id, flags)))
        return [*kept, (b"tracestate", trace.state.encode("latin-1"))] if trace.state else kept

    def _is_sampled(self, trace: TraceContext) -> bool:
        return self.sampler.picks(trace) if trace.parent_id is None else trace.client_samples

    def request_ended(self, record: RequestRecord) -> None:
        attempts = self._attempts.pop(record, [])
        if self.exporter is not None and (reason := self.sampler.reason_to_trace(record)) is not None:
            tree = SpanTree(self._origin, record.trace.trace_id, record.trace.state)
            _add_root(tree, record, reason)
            for span in attempts:
                _add_attempt(tree, record, span)
            self.exporter.put(tree.spans)


def waited(record: RequestRecord) -> float:
    """Seconds that a request waited for the first byte of its answer."""
    ended = record.began if record.ended is None else record.ended
    return (ended if record.first_byte is None else record.first_byte) - record.began


def _add_root(tree: SpanTree, record: RequestRecord, reason: SamplingReason) -> None:
    trace, error = record.trace, record.error
    code = None if error is None else error.code or error.type
    values: Attributes = {
        **of_http(record),
        "error.type": (code or str(record.outcome)) if record.has_failed else None,
        "sluice.refusal.code": None if record.has_failed else code,
        "sluice.sampled.because": reason.value,
    }
    ended = record.began if record.ended is None else record.ended
    tree.add(
        "route",
        record.unix_ns(record.began),
        record.unix_ns(ended),
        trace.parent_id,
        values,
        is_parent_remote=trace.parent_id is not None,
        kind=SpanKind.SERVER,
        failed=record.has_failed,
        span_id=trace.span_id,
    )


def _add_attempt(tree: SpanTree, record: RequestRecord, span: AttemptSpan) -> None:
    address = urlsplit(f"//{span.replica}")
    values: Attributes = {
        "http.request.method": record.method,
        "server.address": address.hostname,
        "server.port": address.port,
        "http.response.status_code": span.status,
        "http.request.resend_count": span.number - 1 or None,
        "sluice.route.replica": span.replica,
        "sluice.route.predicted_ms": None if span.predicted is None else 1000 * span.predicted,
        "sluice.route.retry_because": span.because,
        "error.type": span.error,
    }
    first = span.first_byte
    tree.add(
        "attempt",
        record.unix_ns(span.began),
        record.unix_ns(span.began if span.ended is None else span.ended),
        record.trace.span_id,
        values,
        kind=SpanKind.CLIENT,
        failed=span.error is not None,
        events=[] if first is None else [Event("first_byte", timestamp=record.unix_ns(first))],
        span_id=span.span_id,
    )


@asynccontextmanager
async def open_route_tracing(settings: Settings, telemetry: Telemetry) -> AsyncIterator[RouteTracing]:
    """Trace requests while the block runs, if a collector is set, and then send the remaining spans."""
    collector = Collector.of(settings)
    if collector is None:
        yield RouteTracing(telemetry.clock)
        return
    exporter = background_exporter(collector)
    slow, most = settings.trace_slow_seconds, settings.trace_max_per_second
    sampler = TraceSampler(settings.trace_sample_ratio, slow, most, waited)
    tracing = RouteTracing(telemetry.clock, exporter, sampler, resource())
    telemetry.on_end.append(tracing.request_ended)
    try:
        yield tracing
    finally:
        await exporter.close()
