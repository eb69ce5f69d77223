"""The prefix cache keeps full KV blocks by the hash of their content; prompts with the same first tokens share them.

A block's name stands for its tokens, all tokens before them, and all else that its keys and values depend on (the chain
of hashes in `block_names`). A named block is full and is not written again. It is in one of four states:

- held: by the sequences that run with it;
- idle and evictable: without holders. The victim is the tenant whose idle blocks were used the longest ago, down to its
  floor; `idle_blocks` chooses among the tenant's blocks;
- idle and floored: as many idle blocks of a tenant as its floor says are not evictable;
- idle and pinned: by a tenant's `PinnedPrefixes`, and not evictable.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Protocol

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.block_pool import BlockPool
from backend.paged_kv.block_table import BlockTable
from backend.paged_kv.idle_blocks import PLAIN_CHAIN, IdleBlocks, IdleChain
from backend.paged_kv.kept_accounts import KeptAccounts


class CachedBlock:
    """A full block that has a name. Its contents are valid once the step that computes them is done."""

    __slots__ = (
        "block",
        "chain",
        "holders",
        "is_common",
        "is_copied",
        "is_wanted",
        "name",
        "pinned_for",
        "step",
        "tenant",
    )

    def __init__(self, name: BlockName, block: int, step: int, holder: BlockTable, is_copied: bool = False) -> None:
        self.name: BlockName | None = name  # None: its content cannot be trusted and is not found any more
        self.block = block
        self.step = step  # the step that computes its last token: work launched behind that step may read it
        self.is_copied = is_copied  # from host memory, by that step, and not computed by its first holder
        self.is_wanted = False  # idle, and its last holder was preempted and will come back for it
        self.holders: dict[BlockTable, None] = {holder: None}  # in the order in which they came
        self.tenant = holder.tenant  # of the last holder, while it is idle
        self.pinned_for: tuple[str, ...] = ()  # tenants on whose accounts it stays, while it is idle
        self.chain: IdleChain | None = None  # in which it is idle, or was idle last
        self.is_common = False  # several held it at a time, or one took it alone from blocks that follow on it

    def payer(self, tenant: str) -> BlockTable | None:
        """Return the holder on whose account the tenant is charged for the block: the first that it has."""
        for holder in self.holders:
            if holder.tenant == tenant:
                return holder
        return None


class KVFeature(Protocol):
    """An optional feature of KV memory, called by the prefix cache for every block that changes its state."""

    def becomes_idle(self, cached: CachedBlock) -> bool:
        """A named block lost its last holder. Return True to pin it: it is not evictable until `PrefixCache.unpin`."""
        ...

    def reused(self, cached: CachedBlock) -> None:
        """An idle block has a holder again."""
        ...

    def evicted(self, cached: CachedBlock) -> None:
        """An idle block was evicted; its contents stay on the device until the next step."""
        ...


AgedWorth = Callable[[int, IdleChain, float], float]
"""The worth of keeping a block of an idle chain, taken for a chain of this kind, by its age in seconds."""


class PrefixCache:
    """Cached blocks by name, and idle blocks in eviction order.

    Every operation on a block is O(1), an eviction O(log tenants).
    """

    def __init__(self, pool: BlockPool, worth: AgedWorth | None = None) -> None:
        """`worth` rates a tenant's idle chains; None: the least recently used is evicted first."""
        self._pool = pool
        self._aged_worth = worth
        self._features: list[KVFeature] = []  # called in this order
        self._chain = IdleChain("", PLAIN_CHAIN, None, 0.0, 0)  # the chain that is being left
        self._by_name: dict[BlockName, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self.completed_step = -1  # the newest step that is no longer in flight
        self._uncomputed: list[CachedBlock] = []  # blocks of steps in flight, the oldest first
        self._idle: dict[str, IdleBlocks[CachedBlock]] = {}  # by tenant
        self._floors: dict[str, int] = {}  # idle blocks that are kept for a tenant
        self._ceilings: dict[str, int] = {}  # the most idle blocks of a tenant
        # heap of offered tenants, by the first use of their oldest block, or before
        self._oldest: list[tuple[int, str]] = []
        self._offered: set[str] = set()  # at least all tenants above their floors, each once in the heap
        self._uses = count(1)
        self.num_idle = 0  # cached blocks without a holder
        self.num_floored = 0  # idle blocks that floors keep
        self.kept = KeptAccounts()
        self.num_pinned = 0  # idle blocks that are pinned
        self.evictions = 0  # idle blocks given up so far

    def __len__(self) -> int:
        return len(self._by_name)

    def add_feature(self, feature: KVFeature) -> None:
        """Call this feature from now on, after the features that were added before; a no-op the second time."""
        if feature not in self._features:
            self._features.append(feature)

    @property
    def num_evictable(self) -> int:
        """The idle blocks that neither floors nor pins keep."""
        return self.num_idle - self.num_floored - self.num_pinned

    @property
    def num_kept(self) -> int:
        """The idle blocks that floors and pins keep."""
        return self.num_floored + self.num_pinned

    def num_idle_of(self, tenant: str) -> int:
        """Return the number of unpinned idle blocks that the tenant used last."""
        return len(self._idle[tenant]) if tenant in self._idle else 0

    def idle_by_tenant(self) -> Counter[str]:
        """Return the same number for each tenant."""
        return Counter({tenant: len(idle) for tenant, idle in self._idle.items()})

    def kept_of(self, tenant: str) -> int:
        """Return the number of idle blocks that the tenant's floor keeps."""
        return min(self._floors.get(tenant, 0), self.num_idle_of(tenant))

    def kept_by_tenant(self) -> Counter[str]:
        """Return the same number for each tenant with a floor."""
        return Counter({tenant: self.kept_of(tenant) for tenant in self._floors})

    def idle_blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each tenant with its unpinned idle blocks."""
        return ((tenant, [cached.block for cached in idle]) for tenant, idle in self._idle.items())

    def named(self, name: BlockName) -> CachedBlock | None:
        return self._by_name.get(name)

    def at(self, block: int) -> CachedBlock | None:
        """Return the cached block in this block of the pool; None: it has no name."""
        return self._by_block.get(block)

    def limit(self, tenant: str, floor: int, ceiling: int | None) -> None:
        """Never evict the tenant's last `floor` idle blocks for others; keep at most `ceiling`, None: any number."""
        idle = self.num_idle_of(tenant)
        self._keep(tenant, min(floor, idle) - min(self._floors.get(tenant, 0), idle))
        self._floors.pop(tenant, 0)
        self._ceilings.pop(tenant, None)
        if floor:
            self._floors[tenant] = floor
        if ceiling is not None:
            self._ceilings[tenant] = ceiling
        self._keep_ceiling(tenant)
        self._offer(tenant)

    # blocks come and go

    def publish(self, name: BlockName, block: int, step: int, holder: BlockTable, *, is_copied: bool = False) -> bool:
        """Name an unshared block of the holder, filled by `step`. Return False if another block has the name."""
        if name in self._by_name:
            return False
        cached = CachedBlock(name, block, step, holder, is_copied)
        self._by_name[name] = cached
        self._by_block[block] = cached
        if step > self.completed_step:
            self._uncomputed.append(cached)
        return True

    def publish_all(self, names: Iterable[BlockName], blocks: Iterable[int], step: int, holder: BlockTable) -> None:
        """Name a holder's unnamed blocks, filled by `step`, except where another block has the name."""
        by_name, by_block, new = self._by_name, self._by_block, list[CachedBlock]()
        for name, block in zip(names, blocks, strict=True):
            if name not in by_name and block not in by_block:
                by_name[name] = by_block[block] = cached = CachedBlock(name, block, step, holder)
                new.append(cached)
        if step > self.completed_step:
            self._uncomputed += new

    def replace_idle(self, names: Iterable[BlockName], blocks: Iterable[int], tenant: str) -> None:
        """Free the idle blocks of these names whose content was computed anew in these blocks of the tenant, which get
        the names; those of another tenant with a floor stay.
        """
        for name, block in zip(names, blocks, strict=True):
            cached = self._by_name.get(name)
            if cached is None or cached.holders or cached.pinned_for or block in self._by_block:
                continue
            if cached.tenant == tenant or cached.tenant not in self._floors:
                self._no_longer_idle(cached)
                del self._by_name[name], self._by_block[cached.block]
                self._pool.release([cached.block])

    def completed(self, step: int) -> None:
        """Record that this step has completed, and all earlier ones."""
        self.completed_step, uncomputed = step, self._uncomputed
        if uncomputed and uncomputed[0].step <= step:
            self._uncomputed = [cached for cached in uncomputed if cached.step > step]

    def uncomputed(self, step: int) -> list[CachedBlock]:
        """Return the blocks filled by this step in flight and later ones."""
        return [cached for cached in self._uncomputed if cached.step >= step]

    def invalidate(self, blocks: Iterable[CachedBlock]) -> None:
        """Take the names from held blocks whose contents will not be computed: no sequence hits them any more."""
        invalid = {cached.block: cached for cached in blocks}
        for cached in invalid.values():
            if cached.name is not None:
                del self._by_name[cached.name]
                cached.name = None
        self._uncomputed = [cached for cached in self._uncomputed if cached.block not in invalid]

    def forget(self, cached: CachedBlock) -> None:
        """Forget a block without a name; its only holder owns it."""
        assert cached.name is None and len(cached.holders) == 1
        del self._by_block[cached.block]

    def share(self, cached: CachedBlock, holder: BlockTable) -> None:
        """Add a holder to the block."""
        if not cached.holders:
            self._no_longer_idle(cached)
            cached.is_wanted = False
            for feature in self._features:
                feature.reused(cached)
        cached.holders[holder] = None

    def begin_chain(self, tenant: str, now: float, expects: float | None = None) -> IdleChain:
        """Begin the chain of the blocks that one holder leaves together: the blocks that become idle next are in it."""
        self._chain = IdleChain(tenant, PLAIN_CHAIN, expects, now, next(self._uses))
        return self._chain

    def change_kind(self, chain: IdleChain, kind: int, now: float) -> None:
        """Change the kind of a chain with blocks, as if it were left now."""
        self._idle[chain.tenant].change_kind(chain, kind, now)

    def leave(self, cached: CachedBlock, holder: BlockTable) -> None:
        """Remove one of several holders."""
        del cached.holders[holder]
        assert cached.holders, "its last holder has left: it is idle"

    def retire(self, blocks: Iterable[CachedBlock], tenant: str) -> None:
        """Remove the last holder of these blocks, one of the tenant. They become idle, in the chain begun last; a block
        comes before the block that it follows on.
        """
        idle, chain = self._idle_of(tenant), self._chain
        before, pinned, named, features = len(idle), 0, list[CachedBlock](), self._features
        for cached in blocks:
            cached.holders.clear()
            if cached.name is None:
                del self._by_block[cached.block]
                self._pool.release([cached.block])
                continue
            cached.tenant = tenant
            if features and self._is_pinned(cached):
                pinned += 1
            else:
                named.append(cached)
        idle.add(named, chain)
        now, floor = len(idle), self._floors.get(tenant, 0)
        self.num_idle += now - before + pinned
        self.num_pinned += pinned
        self._keep(tenant, min(now, floor) - min(before, floor))
        if not idle:
            del self._idle[tenant]
            return
        self._keep_ceiling(tenant)
        self._offer(tenant)

    def evict(self, count: int) -> int:
        """Evict idle blocks until the pool has `count` more free; return the number of evicted blocks."""
        evicted = 0
        while evicted < count and (tenant := self._least_recent()) is not None:
            idle = self._idle[tenant]
            since = min((other[0] for other in self._oldest[1:3]), default=0)  # a heap: the second is one of two
            most = min(count - evicted, len(idle) - self._floors.get(tenant, 0))
            evicted += self._evict_first(tenant, most, since)
        return evicted

    def pin(self, cached: CachedBlock) -> None:
        """Make an idle block unevictable; the caller sets `pinned_for`."""
        self._leave_idle(cached)
        self.num_pinned += 1

    def unpin(self, cached: CachedBlock) -> None:
        """Make an idle pinned block evictable again, as if used now."""
        assert not cached.pinned_for
        self.num_pinned -= 1
        self._become_idle(cached)

    def clear(self) -> None:
        """Evict every idle block that is not pinned, floors included."""
        for tenant, idle in list(self._idle.items()):
            self._evict_first(tenant, len(idle))

    def _is_pinned(self, cached: CachedBlock) -> bool:
        """Return True if a feature pins the block, after every feature was asked."""
        is_pinned = False
        for feature in self._features:
            is_pinned = feature.becomes_idle(cached) or is_pinned
        return is_pinned

    def _idle_of(self, tenant: str) -> IdleBlocks[CachedBlock]:
        if tenant not in self._idle:
            self._idle[tenant] = IdleBlocks(None if self._aged_worth is None else self._worth)
        return self._idle[tenant]

    def _worth(self, kind: int, chain: IdleChain) -> float:
        assert self._aged_worth is not None
        return self._aged_worth(kind, chain, self.kept.now - chain.left_at)

    def _least_recent(self) -> str | None:
        """Return the tenant above its floor whose oldest idle block was used the longest ago."""
        while self._oldest:
            since, tenant = self._oldest[0]
            if self.num_idle_of(tenant) > self._floors.get(tenant, 0):
                first = self._idle[tenant].oldest
                if first == since:
                    return tenant
                heapreplace(self._oldest, (first, tenant))
            else:
                heappop(self._oldest)
                self._offered.discard(tenant)
        return None

    def _offer(self, tenant: str) -> None:
        """Offer a tenant above its floor for eviction, once."""
        if tenant not in self._offered and self.num_idle_of(tenant) > self._floors.get(tenant, 0):
            self._offered.add(tenant)
            heappush(self._oldest, (self._idle[tenant].oldest, tenant))

    def _keep_ceiling(self, tenant: str) -> None:
        ceiling = self._ceilings.get(tenant)
        if ceiling is not None and (excess := self.num_idle_of(tenant) - ceiling) > 0:
            self._evict_first(tenant, excess)

    def _evict_first(self, tenant: str, count: int, since: int = 0) -> int:
        """Evict idle blocks of a tenant that were used before `since` (0: any), at least one and at most `count`.

        Returns their number.
        """
        idle = self._idle[tenant]
        floor, before, blocks = self._floors.get(tenant, 0), len(idle), list[int]()
        by_name, by_block, features = self._by_name, self._by_block, self._features
        for cached in idle.give_up(count, since):
            assert cached.name is not None
            blocks.append(cached.block)
            del by_name[cached.name], by_block[cached.block]
            for feature in features:
                feature.evicted(cached)
        self._keep(tenant, min(floor, len(idle)) - min(floor, before))
        if not idle:
            del self._idle[tenant]
        self.num_idle -= len(blocks)
        self.evictions += len(blocks)
        self._pool.release(blocks)
        return len(blocks)

    def _become_idle(self, cached: CachedBlock) -> None:
        tenant = cached.tenant
        idle = self._idle_of(tenant)
        idle.add([cached], IdleChain(tenant, PLAIN_CHAIN, None, self.kept.now, next(self._uses)))
        self._keep(tenant, len(idle) <= self._floors.get(tenant, 0))
        self._keep_ceiling(tenant)
        self._offer(tenant)

    def _no_longer_idle(self, cached: CachedBlock) -> None:
        self.num_idle -= 1
        if cached.pinned_for:
            self.num_pinned -= 1
        else:
            self._leave_idle(cached)

    def _leave_idle(self, cached: CachedBlock) -> None:
        idle = self._idle[cached.tenant]
        idle.take(cached)
        self._keep(cached.tenant, -(len(idle) < self._floors.get(cached.tenant, 0)))
        if not idle:
            del self._idle[cached.tenant]

    def _keep(self, tenant: str, blocks: int) -> None:
        """Record that the tenant's floor keeps `blocks` more idle blocks; negative: fewer."""
        if blocks:
            self.num_floored += blocks
            self.kept.add(tenant, blocks)

    def check_blocks(self, held: Iterable[tuple[int, BlockTable]]) -> None:
        """Assert that names, blocks, holders and idle blocks agree; `held` are all blocks of all block tables."""
        named = [cached for cached in self._by_block.values() if cached.name is not None]
        assert self._by_name.keys() == {cached.name for cached in named}, "a name has no block"
        assert len(self._by_name) == len(named), "two blocks have one name"
        holders: dict[int, set[BlockTable]] = {}
        for block, holder in held:
            holders.setdefault(block, set()).add(holder)
        idle = {cached.block: cached for one in self._idle.values() for cached in one}
        for block, cached in self._by_block.items():
            assert cached.block == block, "a cached block is another than it was"
            assert cached.holders.keys() == holders.get(block, set()), "a cached block has other holders than it counts"
            states = bool(cached.holders), bool(cached.pinned_for), idle.get(block) is cached
            assert states.count(True) == 1, "a cached block is neither held nor pinned nor idle, or more than one"
        assert sum(map(len, self._idle.values())) + self.num_pinned == self.num_idle, "idle blocks were lost"
        kept = sum(min(len(one), self._floors.get(tenant, 0)) for tenant, one in self._idle.items())
        assert kept == self.num_floored, "floors keep another number of blocks than is counted"
        pinned = [cached for cached in self._by_block.values() if cached.pinned_for]
        assert len(pinned) == self.num_pinned, "another number of blocks is pinned than is counted"
        pins = Counter(tenant for cached in pinned for tenant in cached.pinned_for)
        assert self.kept.blocks() == self.kept_by_tenant() + pins, "a tenant is not charged for what is kept for it"
        assert self.num_evictable == 0 or self._least_recent() is not None, "no idle block can be given up"
        assert all(self._by_block.get(cached.block) is cached for cached in self._uncomputed), "a block was forgotten"
        for one in self._idle.values():
            one.check_integrity()
