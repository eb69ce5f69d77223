"""Metrics of the process: its resources, connections and event loop, the policy, the quota store, lost telemetry."""

import os
import resource
import time
from collections import deque
from collections.abc import Callable, Sized
from functools import partial
from pathlib import Path

import torch

from backend.loader import LoadedModel
from backend.roofline import PACKED_BITS, Footprint, Roofline
from backend.worker.peaks import measured_peaks
from gateway.http.connection_table import ConnectionCounts, ConnectionState
from gateway.settings.machine import resident_bytes
from gateway.telemetry.logs.logs import num_lines_dropped
from gateway.telemetry.logs.otlp_log import OtlpLog
from gateway.telemetry.metrics.registry import Family, Kind, Registry
from gateway.telemetry.tracing.tracing import Tracing
from gateway.tenants.alert_sender import AlertSender
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.shared_debts import SharedDebts
from quotas.policy.limit import Resource
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import Script


def show_connections(registry: Registry, table: ConnectionCounts) -> None:
    """Register the metrics of a port's connections."""
    states = [(state, (state.name.lower(),)) for state in ConnectionState]
    is_open = Family("sluice.connections", Kind.GAUGE, "", "Open connections, by state.", ("state",))
    registry.read(is_open, lambda: [(labels, table.num(state)) for state, labels in states])
    closed = Family(
        "sluice.connections.closed", Kind.COUNTER, "", "Connections closed to make room, by state.", ("state",)
    )
    registry.read(closed, lambda: [(labels, table.num_evicted[state]) for state, labels in states])
    registry.total(
        "sluice.connections.refused", "Connections refused: none could be closed for them.", lambda: table.num_refused
    )


_PROC = Path("/proc/self")
_TICK = os.sysconf("SC_CLK_TCK")


def show_resources(registry: Registry) -> None:
    """Register the resources of the process; each is read from the kernel when collected, in tens of microseconds."""
    started = _start_time()
    registry.gauge("process.resident_memory", "Memory of the process in RAM.", resident_bytes, "By")
    registry.total("process.cpu", "Processor time of all threads.", time.process_time, "s")
    registry.gauge("process.open_fds", "Open file descriptors.", _open_fds)
    registry.gauge("process.max_fds", "Most file descriptors that may be open.", _max_fds)
    registry.gauge("process.threads", "Threads, including libraries'.", _threads)
    registry.gauge("process.start_time", "Start of the process, since the epoch.", lambda: started, "s")


def _open_fds() -> int:
    """The number of open files.

    Linux 6.2 tells it without listing them; if no descriptor is left to list them, all are open.
    """
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
    """Returns the fields of `stat` in proc(5) from the third on, which follows the program's name."""
    return (_PROC / "stat").read_text().rpartition(")")[2].split()


LAG_TICKS = 15  # seconds over which the highest lag is shown


class ProcessMetrics:
    """Metrics of the process. A value kept elsewhere is 0 until `bind` registers its source."""

    def __init__(self, registry: Registry, policies: LivePolicy, live: Sized) -> None:
        self._lags: deque[float] = deque(maxlen=LAG_TICKS)
        self._total_lag = 0.0  # seconds
        self._sources: dict[str, Callable[[], float]] = {}
        registry.gauge("sluice.live_requests", "Requests being served.", lambda: len(live))
        self._show_policy(registry, policies)
        registry.gauge("sluice.loop.lag", "The most the event loop was late of late.", self._lag, "s")
        registry.total("sluice.loop.late", "How late the event loop was in all.", lambda: self._total_lag, "s")
        for name, meaning in (
            ("sluice.tasks", "Tasks of the event loop."),
            ("sluice.spans.waiting", "Spans that wait for the collector."),
        ):
            registry.gauge(name, meaning, partial(self._read, name))
        for name, meaning in (
            ("sluice.spans.exported", "Spans handed to the collector."),
            ("sluice.spans.dropped", "Spans lost."),
            ("sluice.traces.capped", "Requests not traced for the cap."),
            ("sluice.log_lines.dropped", "Log lines lost."),
            ("sluice.budget_alerts.sent", "Alerts of budgets that their receivers accepted."),
            ("sluice.budget_alerts.failed", "Alerts of budgets that were given up."),
            ("sluice.request_log.lost", "Ended requests that the log of requests could not keep."),
        ):
            registry.total(name, meaning, partial(self._read, name))
        self._pushes = registry.counter("sluice.metric_exports", "Pushes to the collector.", ("result",))
        for result in ("exported", "failed", "skipped"):
            self._pushes.at(result)
        show_resources(registry)

    def bind(self, name: str, read: Callable[[], float]) -> None:
        self._sources[name] = read

    def pushed(self, result: str) -> None:
        """Count a push of the metrics by its result: exported, failed or skipped."""
        self._pushes.at(result).value += 1

    def tick(self, lag: float) -> None:
        """Note, once a second, by how many seconds the event loop was late."""
        self._lags.append(lag)
        self._total_lag += lag

    def _lag(self) -> float:
        return max(self._lags, default=0.0)

    def _read(self, name: str) -> float:
        return self._sources[name]() if name in self._sources else 0

    @staticmethod
    def _show_policy(registry: Registry, policies: LivePolicy) -> None:
        info = Family("sluice.policy.info", Kind.GAUGE, "", "The policy in force.", ("version",))
        registry.read(info, lambda: [((policies.current.version,), 1)])
        registry.total("sluice.policy.reloads", "Edits taken up.", lambda: policies.num_reloads)
        registry.total("sluice.policy.reload_failures", "Edits not valid.", lambda: policies.num_failures)


# upper bounds of buckets, in seconds
SET_ASIDE_RESOURCES = (Resource.REQUESTS, Resource.INPUT_TOKENS, Resource.OUTPUT_TOKENS, Resource.TOKENS)
STORE_LATENCY = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class StoreMetrics:
    """Counts and times the calls to the quota store."""

    def __init__(self, registry: Registry, store: RedisStore) -> None:
        self._latencies = registry.histogram(
            "sluice.store.latency", "Of calls to the quota store.", STORE_LATENCY, ("script",)
        )
        self._errors = registry.counter("sluice.store.errors", "Calls to the quota store that failed.", ("script",))
        registry.total("sluice.store.outages", "Times the quota store was lost.", lambda: store.num_outages)
        registry.gauge("sluice.store.connected", "Whether the quota store answers.", lambda: int(store.is_connected))
        registry.gauge(
            "sluice.reservations.outstanding", "Reservations that are not settled.", lambda: store.num_unsettled
        )
        aside = Family("sluice.quota.set_aside", Kind.GAUGE, "", "Set aside of limits for an outage.", ("resource",))
        none = dict.fromkeys((limited.value for limited in SET_ASIDE_RESOURCES), 0)
        registry.read(aside, lambda: [((name,), amount) for name, amount in {**none, **store.set_aside()}.items()])
        for script in Script:
            self._latencies.at(script)
            self._errors.at(script)
        store.on_command.append(self._commanded)

    def _commanded(self, name: str, began: float, ended: float, error: Exception | None) -> None:
        self._latencies[name,].observe(ended - began)
        if error is not None:
            self._errors.at(name).value += 1


def show_debts(registry: Registry, debts: SharedDebts | None) -> None:
    """Register the metrics of debts shared with other replicas."""
    registry.gauge("sluice.debts.replicas", "Replicas that share debts.", lambda: debts.replicas if debts else 1)
    staleness, elsewhere = "Since the service of others was learned.", "Service of others that was learned."
    registry.gauge("sluice.debts.staleness", staleness, lambda: debts.staleness if debts else 0.0, "s")
    registry.total("sluice.debts.elsewhere", elsewhere, lambda: debts.elsewhere if debts else 0.0, "s")


def count_losses(metrics: ProcessMetrics, tracing: Tracing | None, otlp_log: OtlpLog | None) -> None:
    """Register the losses of the logs and the traces."""
    records = None if otlp_log is None else otlp_log.exporter
    metrics.bind("sluice.log_lines.dropped", lambda: num_lines_dropped() + (records.num_dropped if records else 0))
    if tracing is not None:
        exporter, sampler = tracing.exporter, tracing.sampler
        metrics.bind("sluice.spans.waiting", lambda: exporter.num_waiting)
        metrics.bind("sluice.spans.exported", lambda: exporter.num_exported)
        metrics.bind("sluice.spans.dropped", lambda: exporter.num_dropped)
        metrics.bind("sluice.traces.capped", lambda: sampler.num_capped)


def count_alerts(metrics: ProcessMetrics, alerts: AlertSender) -> None:
    """Register the numbers of alerts of budgets that this process has sent, and has given up."""
    metrics.bind("sluice.budget_alerts.sent", lambda: alerts.num_sent)
    metrics.bind("sluice.budget_alerts.failed", lambda: alerts.num_failed)


def memory_by_use(model: LoadedModel) -> dict[str, float]:
    """Returns the bytes of the device's memory by their use; of all ranks' devices, as if they were like the first."""
    weights = model.num_parameters * model.dtype.itemsize
    device = model.runner.device
    num_devices = 1 if model.shard is None else model.shard.size
    reserved = num_devices * torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    other = max(0, reserved - weights - model.kv_bytes)
    return {"weights": weights, "kv_cache": model.kv_bytes, "other": other}


def roofline_of(model: LoadedModel, quantization: str) -> Roofline | None:
    """Return the least times of the model's steps on its device, by rates that are measured now; None if a CPU keeps
    its weights in fewer bits than its dtype has, a GPU a file's integers, or the device has no memory left for
    measuring.
    """
    is_cpu = model.runner.device.type == "cpu"
    is_known = quantization in ("auto", "none") or (quantization in PACKED_BITS and not is_cpu)
    if not is_known or (quantization == "auto" and is_cpu and any(model.directory.glob("*.gguf"))):
        return None
    part = model.config if model.shard is None else model.shard.stored(model.config)
    dtype, kv_item_bytes = str(model.dtype).removeprefix("torch."), model.runner.kv.dtype.itemsize
    footprint = Footprint(part, dtype, kv_item_bytes, quantization=quantization)
    peaks = measured_peaks(model.runner.device, model.dtype, footprint.weight_bytes)
    return None if peaks is None else Roofline(footprint, peaks)
