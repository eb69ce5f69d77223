"""Our metrics as the data of OpenTelemetry's SDK, which its exporters take. Totals count from the start."""

from collections.abc import Iterable

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource

from gateway.telemetry.metrics.family import Family, Kind
from gateway.telemetry.metrics.registry import Distribution, Labels, Point, Reading
from gateway.telemetry.otlp import SCOPE

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(readings: Iterable[Reading], resource: Resource, began_ns: int, now_ns: int) -> MetricsData:
    """Moments in Unix nanoseconds. Foreign names are left out."""
    metrics = [_metric(reading, began_ns, now_ns) for reading in readings if not reading.family.is_foreign]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], resource.schema_url)])


def _metric(reading: Reading, began_ns: int, now_ns: int) -> Metric:
    family = reading.family
    data: Sum | Gauge | HistogramData
    match family.kind:
        case Kind.HISTOGRAM:
            data = HistogramData([_histogram(family, *p, began_ns, now_ns) for p in reading.points], _CUMULATIVE)
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
        min=None,  # type: ignore[arg-type]  # optional on the wire, and not known of all time
        max=None,  # type: ignore[arg-type]
    )


def _attributes(family: Family, labels: Labels) -> dict[str, str]:
    """An empty value is the same as no attribute."""
    return {name: str(value) for name, value in zip(family.labels, labels, strict=True) if value}
