"""Block holders, and the account that each block is on: a shared block is charged to each holding tenant once."""

from collections import Counter
from collections.abc import Collection
from typing import Protocol

from backend.paged_kv.block_pool import BlockPool
from backend.paged_kv.prefix_cache import CachedBlock, Holder, PrefixCache
from backend.scheduler.allowances import Allowances


class BlockHolder(Holder, Protocol):
    """A sequence or a pin: it holds the blocks of its table, and its tenant is charged for some of them on its account.

    Compared by identity. The fields mean the same as in `Sequence`.
    """

    @property
    def id(self) -> str: ...

    block_table: list[int]
    num_shared_blocks: int
    num_charged_blocks: int
    num_computed_tokens: int
    kv_block_seconds: float
    held_since: float


Cached = CachedBlock[BlockHolder]


class Holdings:
    """Counts the shared blocks of each holder, and the blocks charged on its account.

    Of a tenant's holders of one block the first pays, and when it leaves, the next. So the charges on the accounts of a
    tenant's holders add up to the blocks that the tenant holds, at any time.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache[BlockHolder], allowances: Allowances) -> None:
        self.now = 0.0  # seconds of the engine's clock, set by the clock's owner
        self.num_shared = 0  # blocks with several holders
        self.num_entries = 0  # of all block tables
        self._pool, self._cache, self._allowances = pool, cache, allowances

    def share(self, holder: BlockHolder, cached: Cached) -> None:
        """Let one more hold a cached block; `append` puts it into its table."""
        holders = cached.holders
        if holders:
            if len(holders) == 1:
                first = next(iter(holders))
                first.num_shared_blocks += 1
                self.num_shared += 1
                cached.is_common |= first.id != holder.id  # else it is kept for the holder, which has come for it
            else:
                cached.is_common = True
            holder.num_shared_blocks += 1
        if cached.payer(holder.tenant) is None:
            holder.num_charged_blocks += 1
            self._allowances.charge(holder.tenant, 1)
        self._cache.share(cached, holder)

    def append(self, holder: BlockHolder, blocks: list[int]) -> None:
        """Add blocks to a holder's table."""
        holder.block_table += blocks
        self.num_entries += len(blocks)

    def own(self, holder: BlockHolder, blocks: list[int]) -> None:
        """Add unshared blocks to a holder's table."""
        self.count_seconds(holder)
        self.append(holder, blocks)
        holder.num_charged_blocks += len(blocks)
        self._allowances.charge(holder.tenant, len(blocks))

    def leave(self, holder: BlockHolder, blocks: list[int]) -> None:
        """Release the last blocks of a holder's table; a block that it paid for is charged to the next holder of its
        tenant.
        """
        self.num_entries -= len(blocks)
        private, alone, at = list[int](), list[Cached](), self._cache.at
        for block in reversed(blocks):  # a block is idle before the one that it follows on
            cached = at(block)
            if cached is None:
                private.append(block)
            elif len(cached.holders) == 1:
                alone.append(cached)
            else:
                self._leave_shared(holder, cached)
        if alone:
            self._cache.retire(alone, holder.tenant)
        private.reverse()
        self._pool.release(private)
        num_charged = len(private) + len(alone)
        holder.num_charged_blocks -= num_charged
        self._allowances.credit(holder.tenant, num_charged)

    def _leave_shared(self, holder: BlockHolder, cached: Cached) -> None:
        """Let a holder go of a block that others hold as well."""
        has_paid = cached.payer(holder.tenant) is holder
        holder.num_shared_blocks -= 1
        self._cache.leave(cached, holder)
        if len(cached.holders) == 1:
            next(iter(cached.holders)).num_shared_blocks -= 1
            self.num_shared -= 1
        if not has_paid:
            return
        holder.num_charged_blocks -= 1
        heir = cached.payer(holder.tenant)
        if heir is None:
            self._allowances.credit(holder.tenant, 1)
        else:
            self.count_seconds(heir)
            heir.num_charged_blocks += 1

    def count_seconds(self, holder: BlockHolder) -> None:
        """Add up a holder's block-seconds; call it before any change of its charge."""
        holder.kv_block_seconds += holder.num_charged_blocks * (self.now - holder.held_since)
        holder.held_since = self.now

    def check_integrity(self, holders: Collection[BlockHolder], pinned: Counter[str]) -> None:
        """Assert that these are all holders, that every shared block has a name, and that each tenant is charged once
        for each block held for it, and for its `pinned` blocks.
        """
        self._allowances.check_integrity()
        uses = Counter(block for one in holders for block in one.block_table)
        shared = {block for block, count in uses.items() if count > 1}
        assert all(len(set(one.block_table)) == len(one.block_table) for one in holders), "a table has a block twice"
        assert all(self._cache.at(block) is not None for block in shared), "two own one block"
        assert len(shared) == self.num_shared, "shared blocks are miscounted"
        assert sum(uses.values()) == self.num_entries, "tables have another number of entries than is counted"
        held = Counter(tenant for tenant, _ in {(one.tenant, block) for one in holders for block in one.block_table})
        assert held + pinned == self._allowances.held, "a tenant is not charged for what it holds"
        charged: Counter[str] = Counter()
        for one in holders:
            assert one.num_shared_blocks == len(shared.intersection(one.block_table)), (
                f"{one.id} miscounts what it shares"
            )
            charged[one.tenant] += one.num_charged_blocks
        assert +charged == held, "what is charged on accounts is not what tenants hold"
