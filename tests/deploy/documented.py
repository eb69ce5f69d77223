"""What docs/metrics.md says there is, and what a PromQL expression asks for."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

OTHER_LABELS = {"job", "instance", "namespace", "pod", "model_name", "le", "of"}  # of targets, buckets and rules
_ROW = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \|\s*([^|]*?)\s*\|", re.MULTILINE)
_NAME = re.compile(r"(?<![\w:$.-])((?:sluice|vllm|gen_ai)[_:][\w:]*\w)\b(?!\s*=)")
_MATCHERS = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_BY = re.compile(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Documented:
    name: str
    kind: str
    labels: frozenset[str]

    @property
    def series(self) -> set[str]:
        """What a query may name."""
        parts = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return {f"{self.name}{part}" for part in parts}


def documented_metrics() -> list[Documented]:
    rows = _ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    return [
        Documented(name, kind, frozenset(label.strip() for label in labels.split(",") if label.strip()))
        for name, kind, labels in rows
    ]


def series_of(query: str) -> set[str]:
    """Names of ours in PromQL."""
    return set(_NAME.findall(_BY.sub("", query)))


def labels_of(query: str) -> set[str]:
    """Labels that it matches or groups by."""
    grouped = {label.strip() for group in _BY.findall(query) for label in group.split(",")}
    return {*_MATCHERS.findall(query), *grouped} - {""}


def strangers(query: str, also: frozenset[str] = frozenset()) -> set[str]:
    """Series and labels that nothing documents. `also`: series that are recorded."""
    known = {name: metric for metric in documented_metrics() for name in metric.series}
    series = series_of(query)
    labels = {label for name in series if name in known for label in known[name].labels}
    unknown_labels = labels_of(query) - labels - OTHER_LABELS if series <= known.keys() else set()
    return (series - known.keys() - also) | unknown_labels
