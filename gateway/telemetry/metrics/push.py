"""Pushes the metrics to a collector at intervals, each from a thread. A push that cannot be made is skipped."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from gateway.background import beside
from gateway.settings.settings import Settings
from gateway.telemetry.metrics.metrics import Metrics
from gateway.telemetry.metrics.registry import Distribution, Family, Kind, Labels, Point, Reading
from gateway.telemetry.otlp import SCOPE, Collector, DeliveryLog, resource

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(readings: Iterable[Reading], resource: Resource, began_ns: int, now_ns: int) -> MetricsData:
    """The readings as OTLP's metrics, except foreign names; moments are in Unix nanoseconds."""
    metrics = [_metric(reading, began_ns, now_ns) for reading in readings if not reading.family.is_foreign]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], resource.schema_url)])


def _metric(reading: Reading, began_ns: int, now_ns: int) -> Metric:
    family = reading.family
    data: Sum | Gauge | Histogram
    match family.kind:
        case Kind.HISTOGRAM:
            data = Histogram([_histogram(family, *p, began_ns, now_ns) for p in reading.points], _CUMULATIVE)
        case Kind.COUNTER:
            data = Sum([_number(family, p, began_ns, now_ns) for p in reading.points], _CUMULATIVE, is_monotonic=True)
        case Kind.GAUGE:
            data = Gauge([_number(family, p, 0, now_ns) for p in reading.points])
    return Metric(family.name, family.meaning, family.unit, data)


def _number(family: Family, point: Point, began_ns: int, now_ns: int) -> NumberDataPoint:
    labels, value = point
    assert not isinstance(value, Distribution)
    return NumberDataPoint(_attributes(family, labels), began_ns, now_ns, value)


def _histogram(
    family: Family, labels: Labels, value: float | Distribution, began_ns: int, now_ns: int
) -> HistogramDataPoint:
    assert isinstance(value, Distribution)
    return HistogramDataPoint(
        _attributes(family, labels),
        began_ns,
        now_ns,
        count=sum(value.counts),
        sum=value.sum,
        bucket_counts=value.counts,
        explicit_bounds=family.bounds,
        min=None,  # type: ignore[arg-type]  # optional on the wire, and unknown
        max=None,  # type: ignore[arg-type]
    )


def _attributes(family: Family, labels: Labels) -> dict[str, str]:
    """Returns the labels as attributes; an empty value is the same as no attribute."""
    return {name: str(value) for name, value in zip(family.labels, labels, strict=True) if value}


log = logging.getLogger(__name__)

MODEL = "sluice.model.name"  # of the resource: one process serves one model
LAST_SECONDS = 2.0  # for a stopping gateway's last push


def metric_exporter(collector: Collector) -> MetricExporter:
    return collector.exporter("metrics", GrpcExporter, HttpExporter)


class MetricPush:
    """Reads the metrics on the event loop and sends them from a thread; `count` is called with each push's result."""

    def __init__(
        self,
        exporter: MetricExporter,
        collect: Callable[[], list[Reading]],
        count: Callable[[str], object],
        resource: Resource,
        interval: float,
    ) -> None:
        """`interval` is in seconds."""
        self._exporter = exporter
        self._collect = collect
        self._count = count
        self._resource = resource
        self._interval = interval
        self._began_ns = time.time_ns()
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None  # of the unfinished push
        self._delivery = DeliveryLog("metrics", interval)

    async def run(self) -> None:
        """Push the metrics at every interval, as long as the server runs."""
        while True:
            await asyncio.sleep(self._interval)
            self.push()

    def push(self) -> None:
        """Start a push, unless the last one is not done yet."""
        if self._thread is not None:
            self._count("skipped")
            return
        self._thread = threading.Thread(target=self._run, args=(self._collect(),), name="metric-push", daemon=True)
        self._thread.start()

    async def close(self, seconds: float = LAST_SECONDS) -> None:
        """Push a last time, and wait at most `seconds` for it."""
        self.push()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)
        self._exporter.shutdown()

    def _run(self, readings: list[Reading]) -> None:
        delivered = self._export(readings)
        self._delivery.log(delivered)
        try:
            self._loop.call_soon_threadsafe(self._done, "exported" if delivered else "failed")
        except RuntimeError:
            log.debug("a push ended after the event loop had closed")

    def _export(self, readings: list[Reading]) -> bool:
        try:
            data = metrics_data(readings, self._resource, self._began_ns, time.time_ns())
            return self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception:
            log.exception("metrics could not be exported")
            return False

    def _done(self, result: str) -> None:
        self._thread = None
        self._count(result)


@asynccontextmanager
async def pushing(settings: Settings, metrics: Metrics) -> AsyncIterator[None]:
    """Push the metrics while the block runs, and once more when it is left, if a collector is set."""
    collector = Collector.of(settings)
    if collector is None:
        yield
        return
    push = MetricPush(
        metric_exporter(collector),
        metrics.registry.collect,
        metrics.process.pushed,
        resource().merge(Resource({MODEL: metrics.model})),
        settings.metrics_interval,
    )
    try:
        async with beside(push.run()):
            yield
    finally:
        await push.close()
