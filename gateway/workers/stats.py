"""Gathers the HTTP workers' reports of every second: connections, delivery latencies, and resources."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gateway.http.connection_table import ConnectionState, ConnectionTable
from gateway.settings.machine import resident_bytes
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.metrics.registry import Family, HistogramSeries, Kind, Point, Registry
from gateway.workers.link import FrameKind
from gateway.workers.worker_client import WorkerClient

REPORT_SECONDS = 1.0


@dataclass(slots=True)
class WorkerStats:
    """A worker's figures since it started, as of its last report. Times are in seconds."""

    connections: list[int] = field(default_factory=lambda: [0 for _ in ConnectionState])
    evicted: list[int] = field(default_factory=lambda: [0 for _ in ConnectionState])
    num_refused: int = 0
    loop_late: float = 0.0
    cpu: float = 0.0
    resident_bytes: int = 0


async def report(client: WorkerClient, table: ConnectionTable, deliveries: DeliveryMetrics) -> None:
    """Report to the engine's process, as long as the worker runs."""
    loop_late = 0.0
    while True:
        due = time.monotonic() + REPORT_SECONDS
        await asyncio.sleep(REPORT_SECONDS)
        loop_late += max(0.0, time.monotonic() - due)
        stats = [
            [table.num(state) for state in ConnectionState],
            table.num_evicted,
            table.num_refused,
            loop_late,
            time.process_time(),
            resident_bytes(),
        ]
        latencies = [_taken(deliveries.first_token), _taken(deliveries.gap)]
        client.link.send(FrameKind.STATS, [client.writing(), stats, latencies])


def _taken(series: HistogramSeries) -> list[Any]:
    """The histogram's counts since the last call."""
    counts, total = series.counts, series.sum
    series.counts, series.sum = [0] * len(counts), 0.0
    return [counts, total]


def add_latencies(deliveries: DeliveryMetrics, latencies: list[Any]) -> None:
    """Add a worker's latencies to the totals."""
    for series, (counts, total) in zip((deliveries.first_token, deliveries.gap), latencies, strict=True):
        series.counts = [mine + its for mine, its in zip(series.counts, counts, strict=True)]
        series.sum += total


class PoolStats:
    """The figures of all workers of a pool, including the last counts of dead workers."""

    def __init__(self, num_workers: int, num_up: Callable[[], int]) -> None:
        """`num_up` returns the number of serving workers."""
        self.by_worker = [WorkerStats() for _ in range(num_workers)]
        self.num_restarts = 0
        self._num_up = num_up
        self._evicted = [0 for _ in ConnectionState]  # by workers that have died
        self._num_refused = 0

    def left(self, index: int) -> None:
        """Keep the last counts of a dead worker."""
        stats, self.by_worker[index] = self.by_worker[index], WorkerStats()
        self._evicted = [sum(pair) for pair in zip(self._evicted, stats.evicted, strict=True)]
        self._num_refused += stats.num_refused

    # as `show_connections` reads them of a `ConnectionTable`

    def num(self, state: ConnectionState) -> int:
        """Returns how many connections are in this state."""
        return sum(stats.connections[state] for stats in self.by_worker)

    @property
    def num_evicted(self) -> list[int]:
        return [before + sum(s.evicted[state] for s in self.by_worker) for state, before in enumerate(self._evicted)]

    @property
    def num_refused(self) -> int:
        return self._num_refused + sum(stats.num_refused for stats in self.by_worker)

    def show(self, registry: Registry) -> None:
        """Register the metrics of the workers themselves."""
        registry.gauge("sluice.http_workers", "HTTP workers that serve.", self._num_up)
        registry.total(
            "sluice.http_worker.restarts", "HTTP workers that had to be started again.", lambda: self.num_restarts
        )
        for name, kind, attribute, unit, meaning in (
            ("loop.late", Kind.COUNTER, "loop_late", "s", "How late the event loop of an HTTP worker was in all."),
            ("cpu", Kind.COUNTER, "cpu", "s", "Processor time of an HTTP worker."),
            ("resident_memory", Kind.GAUGE, "resident_bytes", "By", "Memory of an HTTP worker in RAM."),
        ):
            family = Family(f"sluice.http_worker.{name}", kind, unit, meaning, ("worker",))
            registry.read(family, partial(self._points, attribute))

    def _points(self, attribute: str) -> list[Point]:
        points: list[Point] = [((str(index),), getattr(stats, attribute)) for index, stats in enumerate(self.by_worker)]
        return points or [(("",), 0.0)]  # an empty series, so that dashboards find it
