"""The gateway itself: its event loop, its policy, and what it could not tell anybody."""

import os
import resource
import time
from collections import deque
from collections.abc import Callable, Sized
from pathlib import Path

import torch

from backend.loader import LoadedModel
from gateway.http.connection_table import ConnectionState, ConnectionTable
from gateway.telemetry.logs.logs import num_lines_dropped
from gateway.telemetry.metrics.registry import Family, Kind, Registry
from gateway.telemetry.tracing.tracing import Tracing
from gateway.tenants.live_policy import LivePolicy


def show_connections(registry: Registry, table: ConnectionTable) -> None:
    states = [(state, (state.name.lower(),)) for state in ConnectionState]
    is_open = Family("sluice.connections", Kind.GAUGE, "", "Open connections, by what they are at.", ("state",))
    registry.read(is_open, lambda: [(labels, table.num(state)) for state, labels in states])
    closed = Family(
        "sluice.connections.closed", Kind.COUNTER, "", "Closed to make room, by what they were at.", ("state",)
    )
    registry.read(closed, lambda: [(labels, table.num_evicted[state]) for state, labels in states])
    registry.total("sluice.connections.refused", "Turned away: nobody could make room.", lambda: table.num_refused)


_PROC = Path("/proc/self")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


def show_resources(registry: Registry) -> None:
    """Each is read from the kernel when somebody asks, in some tens of microseconds."""
    started = _start_time()
    registry.gauge("process.resident_memory", "Memory of the process in RAM.", _resident_bytes, "By")
    registry.total("process.cpu", "Processor time of all its threads.", time.process_time, "s")
    registry.gauge("process.open_fds", "Open file descriptors.", _open_fds)
    registry.gauge("process.max_fds", "How many may be open.", _max_fds)
    registry.gauge("process.threads", "Threads, those of libraries included.", _threads)
    registry.gauge("process.start_time", "When it started, since the epoch.", lambda: started, "s")


def _resident_bytes() -> int:
    return int((_PROC / "statm").read_text().split()[1]) * _PAGE


def _open_fds() -> int:
    """Linux 6.2 and newer say how many without listing them. Where none is left to list them with, all are open."""
    try:
        return (_PROC / "fd").stat().st_size or len(os.listdir(_PROC / "fd")) - 1  # noqa: PTH208 - as many as needed
    except OSError:
        return _max_fds()


def _max_fds() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft


def _threads() -> int:
    return int(_stat()[17])


def _start_time() -> float:
    (boot,) = (line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot) + int(_stat()[19]) / _TICK


def _stat() -> list[str]:
    """The fields of proc(5)'s `stat` from the third, which follows the program's name."""
    return (_PROC / "stat").read_text().rpartition(")")[2].split()


LAG_TICKS = 15  # of a second each, over which the loop's lag is the most that was seen


class ProcessMetrics:
    """What others keep is 0 until `bind` says who does."""

    def __init__(self, registry: Registry, policies: LivePolicy, live: Sized) -> None:
        self._lags: deque[float] = deque(maxlen=LAG_TICKS)
        self._late = 0.0  # seconds, the sum of all lags
        self._sources: dict[str, Callable[[], float]] = {}
        registry.gauge("sluice.live_requests", "Requests being served.", lambda: len(live))
        self._show_policy(registry, policies)
        registry.gauge("sluice.loop.lag", "The most the event loop was late of late.", self._lag, "s")
        registry.total("sluice.loop.late", "How late the event loop was in all.", lambda: self._late, "s")
        for name, meaning in (
            ("sluice.tasks", "Tasks of the event loop."),
            ("sluice.spans.waiting", "Spans that wait for the collector."),
        ):
            registry.gauge(name, meaning, self._source(name))
        for name, meaning in (
            ("sluice.spans.exported", "Spans handed to the collector."),
            ("sluice.spans.dropped", "Spans lost."),
            ("sluice.traces.capped", "Requests not traced for the cap."),
            ("sluice.log_lines.dropped", "Log lines lost."),
        ):
            registry.total(name, meaning, self._source(name))
        self._pushes = registry.counter("sluice.metric_exports", "Pushes to the collector.", ("result",))
        for result in ("exported", "failed", "skipped"):
            self._pushes.at(result)
        show_resources(registry)

    def bind(self, name: str, read: Callable[[], float]) -> None:
        """From now on the metric says what `read` does."""
        assert name in self._sources, name
        self._sources[name] = read

    def pushed(self, result: str) -> None:
        """What came of a push: exported, failed or skipped."""
        self._pushes.at(result).value += 1

    def tick(self, lag: float) -> None:
        """Once a second: the event loop was so many seconds late."""
        self._lags.append(lag)
        self._late += lag

    def _lag(self) -> float:
        return max(self._lags, default=0.0)

    def _source(self, name: str) -> Callable[[], float]:
        self._sources[name] = lambda: 0
        return lambda: self._read(name)

    def _read(self, name: str) -> float:
        return self._sources[name]()

    @staticmethod
    def _show_policy(registry: Registry, policies: LivePolicy) -> None:
        info = Family("sluice.policy.info", Kind.GAUGE, "", "The policy in force.", ("version",))
        registry.read(info, lambda: [((policies.current.version,), 1)])
        registry.total("sluice.policy.reloads", "Edits taken up.", lambda: policies.num_reloads)
        registry.total("sluice.policy.reload_failures", "Edits not valid.", lambda: policies.num_failures)


def count_losses(metrics: ProcessMetrics, tracing: Tracing | None) -> None:
    metrics.bind("sluice.log_lines.dropped", num_lines_dropped)
    if tracing is not None:
        exporter, sampler = tracing.exporter, tracing.sampler
        metrics.bind("sluice.spans.waiting", lambda: exporter.num_waiting)
        metrics.bind("sluice.spans.exported", lambda: exporter.num_exported)
        metrics.bind("sluice.spans.dropped", lambda: exporter.num_dropped)
        metrics.bind("sluice.traces.capped", lambda: sampler.num_capped)


def memory_by_use(model: LoadedModel) -> dict[str, float]:
    weights = model.num_parameters * model.dtype.itemsize
    device = model.runner.device
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    other = max(0, reserved - weights - model.kv_bytes)
    return {"weights": weights, "kv_cache": model.kv_bytes, "other": other}
