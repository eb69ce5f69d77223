"""The metrics of this process: counted where things happen, or read off their owners when somebody asks.

The event loop is the only writer and the only reader; a count is an addition to a plain number.
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


Labels = tuple[str, ...]
"""Values, in the order of the family's labels. An empty one stands for a label that is absent."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has counted, as of now."""

    counts: tuple[int, ...]
    sum: float


class Count:
    """One series of a counter: add to `value`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def read(self) -> float:
        return self.value


class Histogram:
    """One series: `counts` of what is at most each bound and above the one before, and of what is above all."""

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


Series = TypeVar("Series", bound=Count | Histogram)
Value = float | Distribution
Point = tuple[Labels, Value]
Read = Callable[[], Iterable[Point]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A family and its series, as of now."""

    family: Family
    points: list[Point]


class Labelled(Generic[Series]):
    """A metric's series by their labels."""

    def __init__(self, labels: int, make: Callable[[], Series]) -> None:
        self._make = make
        self._series: dict[Labels, Series] = {}
        if not labels:
            self.at()

    def at(self, *labels: str) -> Series:
        """The series, which is there from now on."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._make()
        return series

    def read(self) -> list[Point]:
        return [(labels, series.read()) for labels, series in self._series.items()]


class Registry:
    """Every metric, in the order in which they were made known."""

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []  # called before anything is read
        self._metrics: dict[Family, Read] = {}

    @property
    def families(self) -> list[Family]:
        return list(self._metrics)

    def counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Labelled[Count]:
        counts = Labelled(len(labels), Count)
        self.read(Family(name, Kind.COUNTER, "", meaning, labels), counts.read)
        return counts

    def histogram(
        self, name: str, meaning: str, bounds: tuple[float, ...], labels: tuple[str, ...] = (), unit: str = "s"
    ) -> Labelled[Histogram]:
        histograms = Labelled(len(labels), lambda: Histogram(bounds))
        self.read(Family(name, Kind.HISTOGRAM, unit, meaning, labels, bounds), histograms.read)
        return histograms

    def read(self, family: Family, read: Read) -> None:
        """A metric that is kept elsewhere."""
        assert all(family.prometheus_name != known.prometheus_name for known in self._metrics), family.name
        self._metrics[family] = read

    def total(self, name: str, meaning: str, read: Callable[[], float], unit: str = "") -> None:
        """A counter without labels that is kept elsewhere."""
        self.read(Family(name, Kind.COUNTER, unit, meaning), lambda: [((), read())])

    def gauge(self, name: str, meaning: str, read: Callable[[], float], unit: str = "") -> None:
        """A gauge without labels."""
        self.read(Family(name, Kind.GAUGE, unit, meaning), lambda: [((), read())])

    def collect(self) -> list[Reading]:
        """All of it as of now; what is returned does not change any more."""
        for prepare in self.before:
            prepare()
        return [Reading(family, list(read())) for family, read in self._metrics.items()]
