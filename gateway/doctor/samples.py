"""Metrics in Prometheus' text format, read back: what a gateway said of itself at one moment."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Samples:
    """By name, those of a histogram under the names of its series. A name that is absent has no samples."""

    series: dict[str, list[tuple[Labels, float]]]

    @classmethod
    def parse(cls, text: str) -> "Samples":
        """Lines that are no samples are passed over."""
        series: dict[str, list[tuple[Labels, float]]] = {}
        for line in text.split("\n"):
            if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
                labels = {name: _unescaped(value) for name, value in _LABEL.findall(match["labels"] or "")}
                series.setdefault(match["name"], []).append((labels, float(match["value"])))
        return cls(series)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that carry the labels; 0 where there are none."""
        return sum(value for _, value in self._matching(name, labels))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Of a histogram: by upper bound, how many are at most that; +inf last."""
        counts: dict[float, float] = {}
        for found, value in self._matching(f"{name}_bucket", labels):
            bound = float(found.get("le", inf))
            counts[bound] = counts.get(bound, 0.0) + value
        return dict(sorted(counts.items()))

    def _matching(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        return (sample for sample in self.series.get(name, ()) if labels.items() <= sample[0].items())


def _unescaped(value: str) -> str:
    return re.sub(r'\\[\\"n]', lambda match: _ESCAPES[match[0]], value) if "\\" in value else value
