"""What a metric is called and what it means; its name in Prometheus follows from that in OpenTelemetry."""

from dataclasses import dataclass
from enum import StrEnum

_SUFFIXES = {"s": "seconds", "By": "bytes", "By.s": "byte_seconds", "1": "ratio"}


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """`name` and `labels` are OpenTelemetry's; a name with a colon is a foreign one and only Prometheus sees it.

    `unit` is one of UCUM, empty where things are counted.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # upper ones, of a histogram's buckets

    @property
    def is_foreign(self) -> bool:
        return ":" in self.name

    @property
    def prometheus_name(self) -> str:
        """https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/"""
        if self.is_foreign:
            return self.name
        name = self.name.replace(".", "_")
        suffix = _SUFFIXES.get(self.unit, "")
        name = name if name.endswith(suffix) else f"{name}_{suffix}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        return tuple(label.replace(".", "_") for label in self.labels)
