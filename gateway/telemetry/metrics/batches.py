"""Metrics of batches: the lines of each tenant that this replica has settled, and the batches that it runs."""

from collections import Counter
from collections.abc import Mapping

from gateway.telemetry.metrics.labels import OTHER, TenantLabels
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry

RESULTS = ("completed", "failed")


class BatchCounts:
    """The counts of the runner of batches."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, str]] = Counter()  # settled, by tenant and result
        self.running = 0  # batches


def show_batches(registry: Registry, counts: BatchCounts) -> None:
    labels = TenantLabels()
    lines = Family(
        "sluice.batch.lines", Kind.COUNTER, "", "Lines of batches that have been settled.", ("tenant", "result")
    )
    registry.read(lines, lambda: _points(counts.lines, labels))
    registry.gauge("sluice.batches.running", "Batches whose lines this replica computes.", lambda: counts.running)


def _points(lines: Mapping[tuple[str, str], int], labels: TenantLabels) -> list[Point]:
    sums = Counter({(OTHER, result): 0 for result in RESULTS})
    for (tenant, result), count in lines.items():
        sums[labels.of(tenant), result] += count
    return [*sums.items()]
