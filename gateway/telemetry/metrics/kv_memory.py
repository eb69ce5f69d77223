"""Metrics of KV memory: the use of its blocks, and the prefix cache's hits, evictions and swaps."""

from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduler import Scheduler
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry


class KVMetrics:
    """Shows physical blocks: a block shared by several sequences counts once. Values are read on demand."""

    def __init__(self, registry: Registry, scheduler: Scheduler) -> None:
        self._accounts = KVAccounts(scheduler.kv_manager)
        self._counters, self._config = scheduler.counters, scheduler.config
        self._show_blocks(registry)
        self._show_cache(registry)

    def _show_blocks(self, registry: Registry) -> None:
        kv = self._accounts
        registry.gauge("sluice.kv.blocks", "KV blocks in the pool.", lambda: self._config.num_blocks)
        registry.gauge("sluice.kv.blocks_used", "KV blocks held by sequences.", lambda: kv.num_held)
        registry.gauge("sluice.kv.blocks_shared", "KV blocks with several holders.", lambda: kv.num_shared)
        registry.gauge("sluice.kv.blocks_reserved", "KV blocks kept for queued sequences.", lambda: kv.num_reserved)
        registry.gauge("sluice.kv.blocks_cached", "Idle KV blocks: cached, without a holder.", lambda: kv.num_idle)
        registry.gauge("sluice.kv.blocks_kept", "Idle KV blocks kept by floors.", lambda: kv.num_floored)
        registry.gauge("sluice.kv.blocks_pinned", "Idle KV blocks kept by pins.", lambda: kv.num_pinned)
        registry.gauge("sluice.kv.host_blocks", "KV blocks for which the host has room.", lambda: kv.num_host_blocks)
        registry.gauge("sluice.kv.host_blocks_used", "KV blocks that the host has.", lambda: kv.num_swapped)

    def _show_cache(self, registry: Registry) -> None:
        kv, counters = self._accounts, self._counters
        registry.total(
            "sluice.prefix_cache.queries",
            "Prompt tokens looked for in the prefix cache.",
            lambda: kv.num_queried_tokens,
        )
        registry.total(
            "sluice.prefix_cache.hits", "Prompt tokens found in the prefix cache.", lambda: counters.cached_tokens
        )
        registry.total("sluice.prefix_cache.evictions", "Idle KV blocks evicted.", lambda: kv.evictions)
        swapped = Family("sluice.kv.swapped_blocks", Kind.COUNTER, "", "KV blocks copied to or from the host.", ("to",))
        registry.read(swapped, self._swapped)
        registry.total("sluice.kv.swaps_declined", "KV blocks the host did not take.", lambda: kv.swaps_declined)

    def _swapped(self) -> list[Point]:
        return [(("host",), self._counters.swapped_out), (("device",), self._counters.swapped_in)]
