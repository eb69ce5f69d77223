"""The prefix cache keeps full KV blocks by the hash of their content; prompts with the same first tokens share them.

A block's name stands for its tokens, all tokens before them, and all else that its keys and values depend on (the chain
of hashes in `block_names`). A named block is full and is not written again. Its holders are counted; a block without
holders is idle and evictable. The victim is the tenant whose idle blocks were used the longest ago, down to its floor;
`idle_blocks` chooses among the tenant's blocks. Pinned blocks are never evicted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.block_pool import BlockPool
from backend.paged_kv.block_table import BlockTable
from backend.paged_kv.idle_blocks import PLAIN, IdleBlocks, IdleChain, Worth
from backend.paged_kv.kept_accounts import KeptAccounts


class CachedBlock:
    """A full block that has a name. Its contents are there once the step that computes them is done."""

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
        self.step = step  # that computes its last token: work launched behind that step may read it
        self.is_copied = is_copied  # from host memory, by that step, and not computed by its first holder
        self.is_wanted = False  # idle, and its last holder was preempted: it will come back for it
        self.holders: dict[BlockTable, None] = {holder: None}  # in the order in which they came
        self.tenant = holder.tenant  # of the last holder, where it is idle
        self.pinned_for: tuple[str, ...] = ()  # tenants on whose accounts it stays, where it is idle
        self.chain: IdleChain | None = None  # in which it is idle, or was idle last
        self.is_common = False  # several held it at a time, or one took it from others that follow on it

    @property
    def is_held_back(self) -> bool:
        """True if it is, or was when it was idle last, in a chain that newcomers may not take."""
        return self.chain is not None and self.chain.is_held

    def payer(self, tenant: str) -> BlockTable | None:
        """Return the holder on whose account the tenant is charged for the block: the first that it has."""
        for holder in self.holders:
            if holder.tenant == tenant:
                return holder
        return None


class PrefixCache:
    """Cached blocks by their names, and the idle ones in the order in which they are given up.

    Every operation on a block is O(1), and giving one up O(log tenants); nothing looks at all of them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.worth: Worth | None = None  # of an idle chain beside others of its tenant; None: the oldest goes first
        self._pool = pool
        self._chain = IdleChain("", PLAIN, None, 0.0, 0, is_held=False)  # that is being left
        self._by_name: dict[BlockName, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self.completed_step = -1  # the newest step that is no longer in flight
        self._uncomputed: list[CachedBlock] = []  # those of steps in flight, the oldest first
        self._idle: dict[str, IdleBlocks[CachedBlock]] = {}  # by tenant
        self._floors: dict[str, int] = {}  # idle blocks that are kept for a tenant
        self._ceilings: dict[str, int] = {}  # the most that it may have
        self._oldest: list[tuple[int, str]] = []  # heap of those offered, by when their first was used, or before
        self._offered: set[str] = set()  # at least all tenants above their floors, each once in the heap
        self._uses = count(1)
        self._num_idle = self._num_kept = 0
        self.kept = KeptAccounts()
        self.num_pinned = 0  # idle blocks that are pinned
        self.is_pinned: Callable[[CachedBlock], bool] | None = None  # asked of each that becomes idle
        self.taken: Callable[[CachedBlock], object] = lambda cached: None  # told of each that was pinned and is held
        self.num_held_back = 0  # idle blocks of chains that newcomers may not take
        self.num_floor_blocks = 0  # idle blocks that floors may come to keep
        self.evicted: Callable[[CachedBlock], object] = lambda cached: None  # told of each that is given up
        self.reused: Callable[[str], object] = lambda tenant: None  # told of each of a tenant's that is idle no more
        self.floor_set: Callable[[str, int], object] = lambda tenant, floor: None  # told of each floor
        self.evictions = 0  # idle blocks given up so far

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def num_idle(self) -> int:
        """The cached blocks that nobody holds."""
        return self._num_idle

    @property
    def num_evictable(self) -> int:
        """The idle blocks that are anybody's memory: those that are not kept."""
        return self._num_idle - self.num_kept

    @property
    def num_kept(self) -> int:
        """The idle blocks that floors and pins keep."""
        return self._num_kept + self.num_pinned

    def num_idle_of(self, tenant: str) -> int:
        """Return how many idle blocks the tenant used last, without those that are pinned."""
        return len(self._idle[tenant]) if tenant in self._idle else 0

    def idle_by_tenant(self) -> Counter[str]:
        """Return how many idle blocks each tenant used last, without those that are pinned."""
        return Counter({tenant: len(idle) for tenant, idle in self._idle.items()})

    def kept_of(self, tenant: str) -> int:
        """Return how many idle blocks the tenant's floor keeps."""
        return min(self._floors.get(tenant, 0), self.num_idle_of(tenant))

    def kept_by_tenant(self) -> Counter[str]:
        """Return how many idle blocks each tenant's floor keeps."""
        return Counter({tenant: self.kept_of(tenant) for tenant in self._floors})

    def idle_blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the idle blocks of each tenant, without those that are pinned."""
        return ((tenant, [cached.block for cached in idle]) for tenant, idle in self._idle.items())

    def named(self, name: BlockName) -> CachedBlock | None:
        return self._by_name.get(name)

    def num_held_back_from(self, found: Iterable[CachedBlock]) -> int:
        """Return how many idle blocks are held back from a newcomer that has found these."""
        return self.num_held_back and self.num_held_back - sum(not one.holders and one.is_held_back for one in found)

    def at(self, block: int) -> CachedBlock | None:
        """Return what the pool's block is to the cache; None where it has no name."""
        return self._by_block.get(block)

    def limit(self, tenant: str, floor: int, ceiling: int | None) -> None:
        """Never evict the tenant's last `floor` idle blocks for others; keep at most `ceiling`, None: any number."""
        idle = self.num_idle_of(tenant)
        self._keep(tenant, min(floor, idle) - min(self._floors.get(tenant, 0), idle))
        self.num_floor_blocks += floor - self._floors.pop(tenant, 0)
        self._ceilings.pop(tenant, None)
        if floor:
            self._floors[tenant] = floor
        if ceiling is not None:
            self._ceilings[tenant] = ceiling
        self._keep_ceiling(tenant)
        self._offer(tenant)
        self.floor_set(tenant, floor)

    # blocks come and go

    def publish(self, name: BlockName, block: int, step: int, holder: BlockTable, *, is_copied: bool = False) -> bool:
        """Name a block that the holder alone has, and that `step` fills. False where another has the name already."""
        if name in self._by_name:
            return False
        cached = CachedBlock(name, block, step, holder, is_copied)
        self._by_name[name] = cached
        self._by_block[block] = cached
        if step > self.completed_step:
            self._uncomputed.append(cached)
        return True

    def publish_all(self, names: Iterable[BlockName], blocks: Iterable[int], step: int, holder: BlockTable) -> None:
        """Name those of a holder's blocks that have no name yet and hold what no other does, all filled by `step`."""
        by_name, by_block, new = self._by_name, self._by_block, list[CachedBlock]()
        for name, block in zip(names, blocks, strict=True):
            if name not in by_name and block not in by_block:
                by_name[name] = by_block[block] = cached = CachedBlock(name, block, step, holder)
                new.append(cached)
        if step > self.completed_step:
            self._uncomputed += new

    def completed(self, step: int) -> None:
        """Note that a step is done, and those before it."""
        self.completed_step, uncomputed = step, self._uncomputed
        if uncomputed and uncomputed[0].step <= step:
            self._uncomputed = [cached for cached in uncomputed if cached.step > step]

    def uncomputed(self, step: int) -> list[CachedBlock]:
        """Return the blocks that this step in flight, and those behind it, are to fill."""
        return [cached for cached in self._uncomputed if cached.step >= step]

    def invalidate(self, blocks: Iterable[CachedBlock]) -> None:
        """Let nobody find these blocks any more, which somebody holds: they will not hold what their names say."""
        invalid = {cached.block: cached for cached in blocks}
        for cached in invalid.values():
            if cached.name is not None:
                del self._by_name[cached.name]
                cached.name = None
        self._uncomputed = [cached for cached in self._uncomputed if cached.block not in invalid]

    def forget(self, cached: CachedBlock) -> None:
        """Leave a block that has no name any more to its only holder."""
        assert cached.name is None and len(cached.holders) == 1
        del self._by_block[cached.block]

    def share(self, cached: CachedBlock, holder: BlockTable) -> None:
        """Let one more hold the block."""
        if not cached.holders:
            self._no_longer_idle(cached)
            cached.is_wanted = False
            self.reused(cached.tenant)
        cached.holders[holder] = None

    def begin_chain(self, tenant: str, now: float, expects: float | None = None, is_held: bool = False) -> IdleChain:
        """Begin with the blocks that one holder leaves together: what becomes idle of them is a chain."""
        self._chain = IdleChain(tenant, PLAIN, expects, now, next(self._uses), is_held=is_held)
        return self._chain

    def change_kind(self, chain: IdleChain, kind: int, now: float) -> None:
        """Take a chain, which has blocks, for one of another kind that was left just now."""
        self._idle[chain.tenant].change_kind(chain, kind, now)

    def leave(self, cached: CachedBlock, holder: BlockTable) -> None:
        """Let one of several holders go."""
        del cached.holders[holder]
        assert cached.holders, "its last holder has left: it is idle"

    def retire(self, blocks: Iterable[CachedBlock], tenant: str) -> None:
        """Let the tenant's only holder of these blocks go. They are idle from now on, a chain: let those come first
        that follow on others.
        """
        idle, chain = self._idle_of(tenant), self._chain
        before, pinned, named, is_pinned = len(idle), 0, list[CachedBlock](), self.is_pinned
        for cached in blocks:
            cached.holders.clear()
            if cached.name is None:
                del self._by_block[cached.block]
                self._pool.release([cached.block])
                continue
            cached.tenant = tenant
            if is_pinned is not None and is_pinned(cached):
                pinned += 1
            else:
                named.append(cached)
        idle.add(named, chain)
        now, floor = len(idle), self._floors.get(tenant, 0)
        self._num_idle += now - before + pinned
        self.num_pinned += pinned
        self.num_held_back += (now - before) * chain.is_held
        self._keep(tenant, min(now, floor) - min(before, floor))
        if not idle:
            del self._idle[tenant]
            return
        self._keep_ceiling(tenant)
        self._offer(tenant)

    def evict(self, count: int) -> int:
        """Give up idle blocks until the pool has `count` more free; returns how many it has more."""
        evicted = 0
        while evicted < count and (tenant := self._least_recent()) is not None:
            idle = self._idle[tenant]
            since = min((other[0] for other in self._oldest[1:3]), default=0)  # a heap: nobody else is before that
            most = min(count - evicted, len(idle) - self._floors.get(tenant, 0))
            evicted += self._evict_first(tenant, most, since)
        return evicted

    def pin(self, cached: CachedBlock) -> None:
        """Make an idle block unevictable; `pinned_for` says for which tenants."""
        self._leave_idle(cached)
        self.num_pinned += 1

    def unpin(self, cached: CachedBlock) -> None:
        """Let an idle block that was pinned be as others are that were used just now."""
        assert not cached.pinned_for
        self.num_pinned -= 1
        self._become_idle(cached)

    def clear(self) -> None:
        """Give up every idle block that is not pinned, those kept for a floor too."""
        for tenant, idle in list(self._idle.items()):
            self._evict_first(tenant, len(idle))

    def drop_chain(self) -> None:
        """Give up what became idle of the chain that was left last, and let nobody know."""
        blocks: list[CachedBlock] = list(self._chain.blocks.values())  # type: ignore[arg-type]
        for cached in blocks:
            self._no_longer_idle(cached)
            del self._by_name[cached.name], self._by_block[cached.block]  # type: ignore[index]
        self.evictions += len(blocks)
        self._pool.release([cached.block for cached in blocks])

    def _idle_of(self, tenant: str) -> IdleBlocks[CachedBlock]:
        if tenant not in self._idle:
            self._idle[tenant] = IdleBlocks(self.worth)
        return self._idle[tenant]

    def _least_recent(self) -> str | None:
        """Return the tenant above its floor whose first idle block was used the longest ago."""
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
        """Put a tenant among those whose blocks may be given up, if it is above its floor and not there yet."""
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
        by_name, by_block, evicted = self._by_name, self._by_block, self.evicted
        for cached in idle.give_up(count, since):
            assert cached.name is not None
            blocks.append(cached.block)
            del by_name[cached.name], by_block[cached.block]
            if self.num_held_back:
                self.num_held_back -= cached.is_held_back
            evicted(cached)
        self._keep(tenant, min(floor, len(idle)) - min(floor, before))
        if not idle:
            del self._idle[tenant]
        self._num_idle -= len(blocks)
        self.evictions += len(blocks)
        self._pool.release(blocks)
        return len(blocks)

    def _become_idle(self, cached: CachedBlock) -> None:
        tenant = cached.tenant
        idle = self._idle_of(tenant)
        idle.add([cached], IdleChain(tenant, PLAIN, None, self.kept.now, next(self._uses), is_held=False))
        self._keep(tenant, len(idle) <= self._floors.get(tenant, 0))
        self._keep_ceiling(tenant)
        self._offer(tenant)

    def _no_longer_idle(self, cached: CachedBlock) -> None:
        self._num_idle -= 1
        if cached.pinned_for:
            self.num_pinned -= 1
            self.taken(cached)
        else:
            self._leave_idle(cached)

    def _leave_idle(self, cached: CachedBlock) -> None:
        idle = self._idle[cached.tenant]
        idle.take(cached)
        self.num_held_back -= cached.is_held_back
        self._keep(cached.tenant, -(len(idle) < self._floors.get(cached.tenant, 0)))
        if not idle:
            del self._idle[cached.tenant]

    def _keep(self, tenant: str, blocks: int) -> None:
        """Note that the tenant's floor keeps `blocks` more idle blocks; negative: fewer."""
        if blocks:
            self._num_kept += blocks
            self.kept.add(tenant, blocks)

    def check_integrity(self, held: Iterable[tuple[int, BlockTable]]) -> None:
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
        assert sum(map(len, self._idle.values())) + self.num_pinned == self._num_idle, "idle blocks were lost"
        kept = sum(min(len(one), self._floors.get(tenant, 0)) for tenant, one in self._idle.items())
        assert kept == self._num_kept, "floors keep another number of blocks than is counted"
        pinned = [cached for cached in self._by_block.values() if cached.pinned_for]
        assert len(pinned) == self.num_pinned, "another number of blocks is pinned than is counted"
        pins = Counter(tenant for cached in pinned for tenant in cached.pinned_for)
        assert self.kept.blocks() == self.kept_by_tenant() + pins, "a tenant is not charged for what is kept for it"
        assert self.num_evictable == 0 or self._least_recent() is not None, "no idle block can be given up"
        assert all(self._by_block.get(cached.block) is cached for cached in self._uncomputed), "a block was forgotten"
        assert self.num_held_back == sum(cached.is_held_back for cached in idle.values()), "a chain is miscounted"
        for one in self._idle.values():
            one.check_integrity()
