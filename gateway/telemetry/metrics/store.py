"""The quota store as requests meet it."""

from gateway.telemetry.metrics import buckets
from gateway.telemetry.metrics.registry import Registry
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import Script


class StoreMetrics:
    def __init__(self, registry: Registry, store: RedisStore) -> None:
        self._latencies = registry.histogram(
            "sluice.store.latency", "Of calls to the quota store.", buckets.STORE_LATENCY, ("script",)
        )
        self._errors = registry.counter("sluice.store.errors", "Calls to the quota store that failed.", ("script",))
        registry.total("sluice.store.outages", "Times the quota store was lost.", lambda: store.num_outages)
        registry.gauge("sluice.store.connected", "Whether the quota store answers.", lambda: int(store.is_connected))
        registry.gauge(
            "sluice.reservations.outstanding", "Reservations that are not settled.", lambda: store.num_unsettled
        )
        for script in Script:
            self._latencies.at(script)
            self._errors.at(script)
        store.on_command.append(self._commanded)

    def _commanded(self, name: str, began: float, ended: float, error: Exception | None) -> None:
        self._latencies.at(name).observe(ended - began)
        if error is not None:
            self._errors.at(name).value += 1
