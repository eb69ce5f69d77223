"""The gateway's access to one engine's core, at the engine's time."""

from collections.abc import Collection, Iterable, Mapping

from admission.controller import Controller
from admission.scheduling_policy import SchedulingPolicy
from backend.engine import Engine
from backend.paged_kv.block_names import BlockName
from backend.stream import TokenStream

RESERVED_LENGTH_QUANTILE = 0.9  # the quantile of output lengths reserved for an answer of undeclared length


class Admission:
    """Changes the core of a running engine, and has the engine plan again where that may let a sequence run."""

    def __init__(self, engine: Engine, core: Controller) -> None:
        self.clock = engine.clock  # seconds
        self._engine = engine
        self._core = core

    def expected_tokens(self, tenant: str, max_tokens: int) -> int:
        """Returns the length in tokens that the tenant's answers rarely exceed."""
        return self._core.lengths.quantile(tenant, max_tokens, RESERVED_LENGTH_QUANTILE)

    def raise_token_limit(self, stream: TokenStream, tokens: int) -> None:
        """Raise the stream's token limit by `tokens`."""
        self._core.raise_token_limit(stream.sequence, tokens, self.clock())
        self._engine.schedule_soon()

    def charge_side_work(self, tenant: str, seconds: float, is_spare: bool = False) -> None:
        """Charge a tenant for processor seconds spent beside the engine; a request of it, of the spare class if
        `is_spare`, has been admitted before.
        """
        self._core.charge_side_work(tenant, seconds, self.clock(), is_spare)

    def debts_changed(self, served: Mapping[str, float], replicas: int) -> None:
        """Charge tenants for the engine time that the other replicas have served them since the last call; `replicas`
        counts all.
        """
        self._core.debts_changed(served, replicas, self.clock())

    def set_policy(self, policy: SchedulingPolicy) -> None:
        self._core.set_policy(policy, self.clock())

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Set the tenant's lease: the KV blocks that it may hold; None: no limit."""
        self._core.allow(tenant, blocks, self.clock())
        self._engine.schedule_soon()

    def limit_cache(self, tenant: str, floor: int, ceiling: int | None) -> None:
        """Keep at least `floor` and at most `ceiling` idle cached blocks of the tenant; the floor is not evictable."""
        self._core.limit_cache(tenant, floor, ceiling, self.clock())
        self._engine.schedule_soon()

    def pin_prefixes(self, tenant: str, names: Collection[BlockName]) -> None:
        """Pin the cached blocks of these names for the tenant, and unpin all its other blocks."""
        self._core.pin_prefixes(tenant, names, self.clock())
        self._engine.schedule_soon()

    def demand(self, tenant: str) -> int:
        """Return the blocks that the tenant would hold without its lease."""
        return self._core.scheduler.limits.demand(tenant)

    def is_denied(self, tenant: str) -> bool:
        """Return True if a sequence of the tenant was denied blocks since the tenant's lease last changed."""
        return tenant in self._core.scheduler.kv_manager.allowances.requested

    def longest_of(self, tenants: Iterable[str]) -> dict[str, int]:
        """Return by tenant the most blocks that one of its sequences, waiting or running, may need with its adapter."""
        blocks_for, longest = self._core.scheduler.config.kv_blocks, dict.fromkeys(tenants, 0)
        for one in self._engine.sequences:
            if one.tenant in longest:
                of_adapter = 0 if (adapter := one.request.adapter) is None else adapter.num_blocks
                needed = blocks_for(one.request.most_tokens, one.request.model) + of_adapter
                longest[one.tenant] = max(longest[one.tenant], needed)
        return longest
