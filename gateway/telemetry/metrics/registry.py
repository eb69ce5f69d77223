"""The metrics of this process: counted where things happen, or read from their owners when they are collected.

The event loop is the only writer and the only reader; to count is to add to a plain number.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

_SUFFIXES = {"s": "seconds", "By": "bytes", "By.s": "byte_seconds", "1": "ratio"}


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """Describes a metric, as OpenTelemetry names it. A name with a colon is foreign: only Prometheus is shown it.

    `unit` is one of UCUM; it is empty for a number of things.
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
        """Returns the name in Prometheus, by the rules of
        https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/.
        """
        if self.is_foreign:
            return self.name
        name = self.name.replace(".", "_")
        suffix = _SUFFIXES.get(self.unit, "")
        name = name if name.endswith(suffix) else f"{name}_{suffix}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        return tuple(label.replace(".", "_") for label in self.labels)


Labels = tuple[str, ...]
"""The values of a series' labels, in the order of the family's; an empty one stands for an absent label."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The counts and the sum of a histogram at one moment."""

    counts: tuple[int, ...]
    sum: float


class CounterSeries:
    """One series of a counter, whose owner adds to `value`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def read(self) -> float:
        return self.value


class HistogramSeries:
    """One series of a histogram: `counts` of values up to each bound and above the one before, and above the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self) -> Distribution:
        return Distribution(tuple(self.counts), self.sum)


Series = TypeVar("Series", bound=CounterSeries | HistogramSeries)
Value = float | Distribution
Point = tuple[Labels, Value]
Read = Callable[[], Iterable[Point]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A family and the values of its series at one moment."""

    family: Family
    points: list[Point]


class Labelled(dict[Labels, Series], Generic[Series]):
    """The series of a metric by their labels, created on first access."""

    def __init__(self, labels: int, make: Callable[[], Series]) -> None:
        super().__init__()
        self._make = make
        if not labels:
            self.at()

    def at(self, *labels: str) -> Series:
        """Returns the series with these labels."""
        return self[labels]

    def __missing__(self, labels: Labels) -> Series:
        series = self[labels] = self._make()
        return series

    def read(self) -> list[Point]:
        return [(labels, series.read()) for labels, series in self.items()]


class Registry:
    """Every metric, in the order in which they were registered."""

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []  # called before anything is read
        self._metrics: dict[Family, Read] = {}
        self._names = set[str]()  # in Prometheus

    @property
    def families(self) -> list[Family]:
        return list(self._metrics)

    def counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Labelled[CounterSeries]:
        """Register a counter and return its series."""
        counts = Labelled(len(labels), CounterSeries)
        self.read(Family(name, Kind.COUNTER, "", meaning, labels), counts.read)
        return counts

    def histogram(
        self, name: str, meaning: str, bounds: tuple[float, ...], labels: tuple[str, ...] = (), unit: str = "s"
    ) -> Labelled[HistogramSeries]:
        """Register a histogram with these upper bounds of its buckets and return its series."""
        histograms = Labelled(len(labels), lambda: HistogramSeries(bounds))
        self.read(Family(name, Kind.HISTOGRAM, unit, meaning, labels, bounds), histograms.read)
        return histograms

    def read(self, family: Family, read: Read) -> None:
        """Register a metric whose values are kept elsewhere."""
        assert family.prometheus_name not in self._names, family.name
        self._names.add(family.prometheus_name)
        self._metrics[family] = read

    def total(self, name: str, meaning: str, read: Callable[[], float], unit: str = "") -> None:
        """Register a counter without labels whose value is kept elsewhere."""
        self.read(Family(name, Kind.COUNTER, unit, meaning), lambda: [((), read())])

    def gauge(self, name: str, meaning: str, read: Callable[[], float], unit: str = "") -> None:
        """Register a gauge without labels."""
        self.read(Family(name, Kind.GAUGE, unit, meaning), lambda: [((), read())])

    def collect(self) -> list[Reading]:
        """Returns the values of all metrics at this moment, which do not change any more."""
        for prepare in self.before:
            prepare()
        return [Reading(family, list(read())) for family, read in self._metrics.items()]
