"""The state of a running gateway at one moment, read from its metrics and its admin API."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from quotas.policy.units import duration

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Samples:
    """Parsed metrics by name; a histogram's are under the names of its series, and an absent name has no samples."""

    series: dict[str, list[tuple[Labels, float]]]

    @classmethod
    def parse(cls, text: str) -> "Samples":
        """Parse Prometheus' text format, ignoring lines that are no samples."""
        series: dict[str, list[tuple[Labels, float]]] = {}
        for line in text.split("\n"):
            if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
                labels = {name: _unescaped(value) for name, value in _LABEL.findall(match["labels"] or "")}
                series.setdefault(match["name"], []).append((labels, float(match["value"])))
        return cls(series)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that carry the labels; 0 where there are none."""
        return sum(value for _, value in self._matching(name, labels))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return a metric's samples that carry `labels`, by the value of another label."""
        return {found[label]: value for found, value in self._matching(name, labels) if label in found}

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, +inf last."""
        counts: dict[float, float] = {}
        for found, value in self._matching(f"{name}_bucket", labels):
            bound = float(found.get("le", inf))
            counts[bound] = counts.get(bound, 0.0) + value
        return dict(sorted(counts.items()))

    def _matching(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        return (sample for sample in self.series.get(name, ()) if labels.items() <= sample[0].items())


def _unescaped(value: str) -> str:
    return re.sub(r'\\[\\"n]', lambda match: _ESCAPES[match[0]], value) if "\\" in value else value


PATHS = ("overview", "tenants", "queue", "requests", "policy")
"""Paths below /admin/v1/ whose answers a snapshot holds, beside the metrics."""

WINDOW_SECONDS = 3.0
HISTORY_SECONDS = 300.0  # an operator who comes to look asks for the troubles of minutes ago
METRICS_INTERVAL_SECONDS = 15.0  # between two kept sets of metrics, some 10 KB each
"""Seconds between two snapshots: some hundred steps, and longer than any healthy step."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Targets:
    """The promised times of one class, in seconds; None where it promises none."""

    ttft: float | None
    time_per_output_token: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics and answers of the admin API at one moment; `at` is in seconds of a clock that both snapshots share."""

    at: float
    samples: Samples
    overview: Json
    tenants: tuple[Json, ...]
    waiting: tuple[Json, ...]  # rows of the queue
    live: tuple[Json, ...]  # requests being served
    targets: Mapping[str, Targets]  # by class

    @classmethod
    def of(cls, at: float, metrics: str, answers: Mapping[str, Json]) -> "Snapshot":
        """Make a snapshot from metrics and the `answers` of the admin API, by the names in `PATHS`."""
        classes = answers["policy"]["effective"]["classes"]
        return cls(
            at,
            Samples.parse(metrics),
            answers["overview"],
            tuple(answers["tenants"]["tenants"]),
            tuple(answers["queue"]["waiting"]),
            tuple(answers["requests"]["live"]),
            {name: _targets(fields) for name, fields in classes.items()},
        )

    @property
    def engine(self) -> Json:
        engine: Json = self.overview["engine"]
        return engine

    @property
    def kv_share(self) -> float:
        return float(self.engine["kv_blocks_used"] / max(1, self.engine["kv_blocks"]))


def _targets(fields: Json) -> Targets:
    return Targets(_seconds(fields.get("ttft")), _seconds(fields.get("time_per_output_token")))


def _seconds(text: str | None) -> float | None:
    return None if text is None else duration(text)


class DoctorError(Exception):
    """A gateway cannot be read; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two snapshots. Labels narrow a metric to the series that carry them."""

    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        return max(self.after.at - self.before.at, 1e-9)

    def both(self, name: str) -> float:
        """The lesser of the engine's two figures: a lower bound throughout, as far as known."""
        return float(min(self.before.engine[name], self.after.engine[name]))

    @property
    def both_samples(self) -> tuple[Samples, Samples]:
        return self.before.samples, self.after.samples

    def throughout(self, gauge: str) -> float:
        """The lesser of a gauge's two values: a lower bound throughout, as far as known."""
        return min(self.before.samples.total(gauge), self.after.samples.total(gauge))

    def increase(self, name: str, **labels: str) -> float:
        """The growth of a counter; after a reset it counts from 0."""
        before, after = self.before.samples.total(name, **labels), self.after.samples.total(name, **labels)
        return after - before if after >= before else after

    def count(self, histogram: str, **labels: str) -> float:
        return self.increase(f"{histogram}_count", **labels)

    def mean(self, histogram: str, **labels: str) -> float:
        """Return the mean of a histogram's observations, 0 where there were none."""
        count = self.count(histogram, **labels)
        return self.increase(f"{histogram}_sum", **labels) / count if count else 0.0

    def quantile(self, share: float, histogram: str, **labels: str) -> float:
        """Return a quantile of a histogram's observations, on a straight line within its bucket; 0 of none."""
        before = self.before.samples.buckets(histogram, **labels)
        low, passed, increases = 0.0, 0.0, self.after.samples.buckets(histogram, **labels)
        wanted = share * max(0.0, increases.get(inf, 0.0) - before.get(inf, 0.0))
        for bound, count in increases.items():
            now = count - before.get(bound, 0.0)
            if now >= wanted > passed:
                return low if bound == inf else low + (bound - low) * (wanted - passed) / (now - passed)
            low, passed = bound, now
        return 0.0

    def above(self, threshold: float, histogram: str, **labels: str) -> "CountAbove":
        """The number of observations certainly above the threshold: above the next bound of the buckets."""
        before = self.before.samples.buckets(histogram, **labels)
        after = self.after.samples.buckets(histogram, **labels)
        increases = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
        bound = next((bound for bound in increases if bound >= threshold), inf)
        total = max(0.0, increases.get(inf, 0.0))
        return CountAbove(bound, max(0.0, total - increases.get(bound, 0.0)), total)


@dataclass(frozen=True, slots=True)
class CountAbove:
    """The number of observations above a bound: `count` of `total`."""

    bound: float
    count: float
    total: float

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0
