"""All metrics of a gateway, connected to their sources, and the page that Prometheus scrapes."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from admission.controller import Controller
from backend.engine import Engine
from backend.roofline import Roofline
from gateway.http.connection_table import ConnectionCounts
from gateway.replica.reader import ReplicaReader
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.metrics.batches import BatchCounts, show_batches
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.metrics.engine import DisconnectMetrics, EngineMetrics, show_kv, show_work
from gateway.telemetry.metrics.estimates import EstimateMetrics
from gateway.telemetry.metrics.grammars import GrammarSources, count_grammars
from gateway.telemetry.metrics.labels import ClassNames
from gateway.telemetry.metrics.process import ProcessMetrics, StoreMetrics, show_connections, show_debts
from gateway.telemetry.metrics.prometheus import exposition_in_turns
from gateway.telemetry.metrics.queue import QueueMetrics
from gateway.telemetry.metrics.registry import Registry
from gateway.telemetry.metrics.requests import RequestMetrics
from gateway.telemetry.metrics.tenants import TenantMetrics
from gateway.telemetry.metrics.vllm import VllmMetrics
from gateway.telemetry.request_record import RequestRecord, Telemetry, Together
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.shared_debts import SharedDebts
from quotas.store.redis_store import RedisStore

TICK_SECONDS = 1.0
STALLED_SECONDS = 1.0  # without progress of a write


@dataclass(frozen=True, slots=True)
class Sources:
    """The objects from which metrics are read."""

    model: str  # the served name
    engine: Engine
    core: Controller
    core_telemetry: CoreTelemetry
    telemetry: Telemetry
    policies: LivePolicy
    store: RedisStore
    block_bytes: int
    memory: Callable[[], Mapping[str, float]]  # bytes of the device's memory by their use
    connections: ConnectionCounts  # of the tenants' port
    backlog_target: float  # target backlog of one replica, in seconds of work
    grammars: GrammarSources | None = None  # None: no answer can be constrained
    batches: BatchCounts = field(default_factory=BatchCounts)
    debts: SharedDebts | None = None  # None: what other replicas serve does not count
    roofline: Roofline | None = None  # None: unknown, of several models or of quantized weights


class Metrics:
    """Makes every metric and connects it to its source. Owned by the event loop; `run` is a task beside the server."""

    def __init__(self, sources: Sources) -> None:
        core, telemetry, policies = sources.core, sources.telemetry, sources.policies
        clock, scheduler, live = telemetry.clock, core.scheduler, telemetry.live
        registry, classes = Registry(), ClassNames(policies)
        self.registry = registry
        ended = Together(self._ended)
        self._count = ended.flush
        registry.before.append(self._count)
        self.model = sources.model
        self.constant = (("model_name", sources.model),)  # labels of all series
        self._sources = sources

        self._requests = RequestMetrics(registry, sources.model, classes)
        self._disconnects = DisconnectMetrics(registry, self._num_orphans)
        self._queue = QueueMetrics(registry, core, classes, clock)
        self._estimates = EstimateMetrics(registry, core, classes)
        self._engine = EngineMetrics(registry, core, sources.memory, sources.roofline)
        count_grammars(registry, sources.grammars, scheduler.counters)
        show_kv(registry, scheduler)
        self._tenants = TenantMetrics(registry, core, live, policies, sources.block_bytes, clock)
        self._store = StoreMetrics(registry, sources.store)
        show_debts(registry, sources.debts)
        show_batches(registry, sources.batches)
        self.process = ProcessMetrics(registry, policies, live)
        show_connections(registry, sources.connections)
        registry.gauge("sluice.stalled_writes", "Answers whose client does not read.", self._num_stalled)
        self.deliveries = DeliveryMetrics(clock)
        self._vllm = VllmMetrics(registry, scheduler, self.deliveries)
        self.replica = ReplicaReader(
            sources.model, core, sources.backlog_target, clock, lambda: policies.current.version
        )
        show_work(registry, self.replica, core.step_time)

        sources.core_telemetry.on_admit.append(self._queue.admitted)
        sources.core_telemetry.on_step.append(self._engine.stepped)
        sources.core_telemetry.on_release.append(self._disconnects.released)
        telemetry.on_end += [self.replica.ended, ended]

    async def prometheus_text(self) -> bytes:
        """Returns every metric in Prometheus' text format, as of the call."""
        return await exposition_in_turns(self.registry.collect(), self.constant)

    async def run(self) -> None:
        """Measure the lag of the event loop every second, as long as the server runs."""
        clock = self._sources.telemetry.clock
        while True:
            due = clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.process.tick(max(0.0, clock() - due))
            self._count()
            self._tenants.tick()

    def _ended(self, record: RequestRecord) -> None:
        self._requests.ended(record)
        self._disconnects.ended(record)
        self._queue.ended(record)
        self._estimates.ended(record)
        self._tenants.ended(record)
        self._vllm.ended(record)

    def _num_stalled(self) -> int:
        """The number of writes without progress for a second."""
        since = self._sources.telemetry.clock() - STALLED_SECONDS
        scopes = [record.scope for record in self._sources.telemetry.live if record.scope is not None]
        return sum(scope.writing_since is not None and scope.writing_since < since for scope in scopes)

    def _num_orphans(self) -> int:
        timelines = (timeline for record in self._sources.telemetry.live for timeline in record.engine.timelines)
        return max(0, self._sources.engine.num_streams - sum(timeline.ended is None for timeline in timelines))
