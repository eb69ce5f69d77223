"""Pinned prefixes, as of system prompts: once computed they stay, on the accounts of the tenants that pin them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.allowances import Allowances


class PinnedPrefixes:
    """Keeps idle blocks with pinned names from eviction, and charges the tenants that pinned them.

    A pin computes nothing ahead: the first request with the prefix does. While sequences hold a block, their tenants
    are charged for it as for any; the pin is charged from the time the last holder leaves. Idle pinned blocks count
    towards their tenant's allowance, and are unpinned before the allowance keeps a sequence from running.
    """

    def __init__(self, cache: PrefixCache, allowances: Allowances) -> None:
        self._cache, self._allowances = cache, allowances
        self._names: dict[str, dict[BlockName, None]] = {}  # pinned by each tenant, in the order of the prefix
        self._tenants: dict[BlockName, tuple[str, ...]] = {}  # tenants that pin each name
        self._idle: dict[str, dict[int, CachedBlock]] = {}  # pinned blocks of each tenant, a prefix's last first
        self._above: dict[str, None] = {}  # tenants perhaps above their allowance
        self.reuses: Counter[str] = Counter()  # hits on idle pinned blocks, by tenant

    def idle_of(self, tenant: str) -> int:
        return len(self._idle.get(tenant, ()))

    def idle_by_tenant(self) -> Counter[str]:
        """Return the idle pinned blocks of each tenant: a block pinned by two tenants counts for both."""
        return Counter({tenant: len(blocks) for tenant, blocks in self._idle.items()})

    def idle_blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each tenant with its idle pinned blocks."""
        return ((tenant, list(blocks)) for tenant, blocks in self._idle.items())

    def pinned_by_tenant(self) -> Counter[str]:
        """Return the pinned names of each tenant, computed or not."""
        return Counter({tenant: len(names) for tenant, names in self._names.items()})

    def pin(self, tenant: str, names: Iterable[BlockName]) -> None:
        """Set the names that the tenant pins, in the order of the prefix."""
        before, after = self._names.pop(tenant, {}), dict.fromkeys(names)
        if after:
            self._names[tenant] = after
            self._cache.add_feature(self)
        for name in reversed(before):
            if name not in after:
                self._unpin(tenant, name)
        for name in reversed(after):
            if name not in before:
                self._pin(tenant, name)
        self.unpin_excess()

    def give_way(self, tenant: str, needed: int, besides: Collection[CachedBlock] = ()) -> None:
        """Unpin idle blocks of the tenant, except `besides`, until its allowance permits `needed` more; none if all are
        too few.
        """
        allowed, blocks = self._allowances.allowed(tenant), self._idle.get(tenant)
        if allowed is None or not blocks or self._allowances.held[tenant] + needed <= allowed:
            return
        stay = {cached.block for cached in besides}
        lacking = self._allowances.held[tenant] + needed - allowed
        may_go = [cached for block, cached in blocks.items() if block not in stay]
        if len(may_go) >= lacking:
            for cached in may_go[:lacking]:
                self._let_go(tenant, cached)

    def unpin_excess(self) -> None:
        """Unpin idle blocks of tenants above their allowance."""
        while self._above:
            tenant, _ = self._above.popitem()
            allowed = self._allowances.allowed(tenant)
            excess = 0 if allowed is None else self._allowances.held[tenant] - allowed
            for cached in list(self._idle.get(tenant, {}).values())[: max(0, excess)]:
                self._let_go(tenant, cached)

    def allowed(self, tenant: str) -> None:
        """Settle after a change of the tenant's allowance."""
        self._above[tenant] = None
        self.unpin_excess()

    def becomes_idle(self, cached: CachedBlock) -> bool:
        """Keep the block for each tenant that pins its name; True if any does."""
        assert cached.name is not None
        tenants = self._tenants.get(cached.name, ())
        for tenant in tenants:
            self._keep(tenant, cached)
        return bool(tenants)

    def _keep(self, tenant: str, cached: CachedBlock) -> None:
        cached.pinned_for += (tenant,)
        self._idle.setdefault(tenant, {})[cached.block] = cached
        self._allowances.charge(tenant, 1)
        self._cache.kept.add(tenant, 1)
        if self._allowances.allowed(tenant) is not None:
            self._above[tenant] = None

    def _let_go(self, tenant: str, cached: CachedBlock) -> None:
        cached.pinned_for = tuple(one for one in cached.pinned_for if one != tenant)
        self._forget(tenant, cached)
        if not cached.pinned_for:
            self._cache.unpin(cached)

    def reused(self, cached: CachedBlock) -> None:
        """End the charge for an idle pinned block that a sequence takes."""
        for tenant in cached.pinned_for:
            self._forget(tenant, cached)
            self.reuses[tenant] += 1
        cached.pinned_for = ()

    def evicted(self, cached: CachedBlock) -> None:
        assert not cached.pinned_for, "a pinned block was evicted"

    def _forget(self, tenant: str, cached: CachedBlock) -> None:
        blocks = self._idle[tenant]
        del blocks[cached.block]
        if not blocks:
            del self._idle[tenant]
        self._allowances.credit(tenant, 1)
        self._cache.kept.add(tenant, -1)

    def _pin(self, tenant: str, name: BlockName) -> None:
        self._tenants[name] = (*self._tenants.get(name, ()), tenant)
        cached = self._cache.named(name)
        if cached is not None and not cached.holders:
            if not cached.pinned_for:
                self._cache.pin(cached)
            self._keep(tenant, cached)

    def _unpin(self, tenant: str, name: BlockName) -> None:
        others = tuple(one for one in self._tenants[name] if one != tenant)
        if others:
            self._tenants[name] = others
        else:
            del self._tenants[name]
        cached = self._cache.named(name)
        if cached is not None and tenant in cached.pinned_for:
            self._let_go(tenant, cached)

    def check_integrity(self) -> None:
        """Assert that every kept block is idle and pinned, and that the two indexes agree."""
        pins = {(name, tenant) for tenant, names in self._names.items() for name in names}
        assert pins == {(name, tenant) for name, tenants in self._tenants.items() for tenant in tenants}, "a lost pin"
        assert not self._above, "a tenant may be above its allowance for what is pinned"
        for tenant, blocks in self._idle.items():
            allowed = self._allowances.allowed(tenant)
            assert allowed is None or self._allowances.held[tenant] <= allowed, "a pin holds more than its tenant may"
            for block, cached in blocks.items():
                assert cached.block == block and not cached.holders, "a block is kept that is not idle"
                assert tenant in cached.pinned_for and (cached.name, tenant) in pins, "a block is kept for no tenant"
