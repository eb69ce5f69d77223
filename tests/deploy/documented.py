"""What docs/metrics.md says there is, and what a PromQL expression asks for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

OTHER_LABELS = {"job", "instance", "namespace", "pod", "model_name", "le", "of"}  # of targets, buckets and rules
PROMETHEUS = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate"})}  # its own series

_ROW = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \|\s*([^|]*?)\s*\| ([^|]+) \|", re.MULTILINE)
_GROUPING = re.compile(r"\b(by|without|ignoring|on)\s*\(([^)]*)\)")
_NO_NAMES = re.compile(rf'"[^"]*"|\{{[^}}]*\}}|\[[^\]]*\]|{_GROUPING.pattern}|\b(?:and|or|unless)\b')
_NAME = re.compile(r"(?<![\w:.])[A-Za-z_:][\w:]*\b(?!\s*\()")  # of a series: a function's is before a parenthesis
_MATCHERS = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


@dataclass(frozen=True)
class Documented:
    name: str
    kind: str
    labels: frozenset[str]
    unit: str

    @property
    def series(self) -> set[str]:
        """What a query may name."""
        parts = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return {f"{self.name}{part}" for part in parts}


@cache
def documented_metrics(file: str = "metrics.md") -> list[Documented]:
    rows = _ROW.findall((ROOT / "docs" / file).read_text())
    return [Documented(name, kind, frozenset(_listed(labels)), unit) for name, kind, labels, unit in rows]


def all_documented() -> list[Documented]:
    """Those of a gateway, and those of a router."""
    return documented_metrics() + documented_metrics("fleet.md")


def series_of(query: str) -> set[str]:
    """Names of series in PromQL."""
    return set(_NAME.findall(_NO_NAMES.sub(" ", query)))


def labels_of(query: str) -> set[str]:
    """Labels that it matches or groups by."""
    return {*_MATCHERS.findall(query), *(label for _, labels in _GROUPING.findall(query) for label in _listed(labels))}


def strangers(query: str, recorded: Mapping[str, str] = {}) -> set[str]:
    """Series and labels that nothing documents. `recorded`: queries by the series that rules make of them."""
    known = PROMETHEUS | {name: metric.labels for metric in all_documented() for name in metric.series}
    known |= {name: _labels_left(expression, known) for name, expression in recorded.items()}
    series = series_of(query)
    labels = {label for name in series & known.keys() for label in known[name]}
    return (series - known.keys()) | (labels_of(query) - labels - OTHER_LABELS)


def _labels_left(query: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Of what a rule records, whose query groups by what it leaves out, if at all."""
    left_out = {label for how, labels in _GROUPING.findall(query) if how == "without" for label in _listed(labels)}
    return frozenset[str]().union(*(known[name] for name in series_of(query))) - left_out


def unit_of(query: str) -> str:
    """What a query of the dashboard yields, in the words of the documentation; `/s` behind what is by second."""
    over, *under = map(_unit_of_operand, query.split(" / "))
    return over if not under else "share" if under == [over] else over.removesuffix("/s")


def _unit_of_operand(query: str) -> str:
    (name,) = series_of(query)
    (metric,) = (metric for metric in all_documented() if name in metric.series)
    unit = "observations" if name.endswith("_count") else metric.unit
    return f"{unit}/s" if "rate(" in query and "histogram_quantile(" not in query else unit


def _listed(labels: str) -> list[str]:
    return re.findall(r"\w+", labels)
