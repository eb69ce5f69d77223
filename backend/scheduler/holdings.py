"""Block tables as holders of blocks, and the account that each block is on: each holding tenant is charged once."""

from collections import Counter
from collections.abc import Collection

from backend.paged_kv.block_pool import BlockPool
from backend.paged_kv.block_table import BlockTable
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.allowances import Allowances


class Holdings:
    """Writes block tables: counts the shared blocks of each, and the blocks charged on its account.

    Of a tenant's holders of one block the first pays, and when it leaves, the next. So the charges on the accounts of a
    tenant's holders add up to the blocks that the tenant holds, at any time.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache, allowances: Allowances) -> None:
        self.now = 0.0  # seconds of the engine's clock, set by the clock's owner
        self.num_shared = 0  # blocks with several holders
        self.num_entries = 0  # of all block tables
        self._pool, self._cache, self._allowances = pool, cache, allowances

    def share(self, table: BlockTable, cached: CachedBlock) -> None:
        """Let one more table hold a cached block; `append` adds it to the table."""
        holders = cached.holders
        if holders:
            if len(holders) == 1:
                first = next(iter(holders))
                first.num_shared += 1
                self.num_shared += 1
            cached.is_common = True
            table.num_shared += 1
        if cached.payer(table.tenant) is None:
            table.num_charged += 1
            self._allowances.charge(table.tenant, 1)
        self._cache.share(cached, table)

    def append(self, table: BlockTable, blocks: list[int]) -> None:
        """Add blocks to a table."""
        table.blocks += blocks
        table.peak = max(table.peak, len(table.blocks))
        self.num_entries += len(blocks)

    def own(self, table: BlockTable, blocks: list[int]) -> None:
        """Add unshared blocks to a table."""
        self.count_seconds(table)
        self.append(table, blocks)
        table.num_charged += len(blocks)
        self._allowances.charge(table.tenant, len(blocks))

    def leave(self, table: BlockTable, first: int = 0, stop: int | None = None) -> None:
        """Release a table's blocks from index `first` on, to `stop` if it is given; a block that it paid for is charged
        to the next table of its tenant.
        """
        blocks = table.blocks[first:stop]
        del table.blocks[first:stop]
        self.num_entries -= len(blocks)
        private, alone, at = list[int](), list[CachedBlock](), self._cache.at
        for block in reversed(blocks):  # a block becomes idle before its predecessor
            cached = at(block)
            if cached is None:
                private.append(block)
            elif len(cached.holders) == 1:
                alone.append(cached)
            else:
                self._leave_shared(table, cached)
        if alone:
            self._cache.retire(alone, table.tenant)
        private.reverse()
        self._pool.release(private)
        num_charged = len(private) + len(alone)
        table.num_charged -= num_charged
        self._allowances.credit(table.tenant, num_charged)

    def _leave_shared(self, table: BlockTable, cached: CachedBlock) -> None:
        """Release a block that other tables hold as well."""
        has_paid = cached.payer(table.tenant) is table
        table.num_shared -= 1
        self._cache.leave(cached, table)
        if len(cached.holders) == 1:
            next(iter(cached.holders)).num_shared -= 1
            self.num_shared -= 1
        if not has_paid:
            return
        table.num_charged -= 1
        heir = cached.payer(table.tenant)
        if heir is None:
            self._allowances.credit(table.tenant, 1)
        else:
            self.count_seconds(heir)
            heir.num_charged += 1

    def count_seconds(self, table: BlockTable) -> None:
        """Add up a table's block-seconds; call it before any change of its charge."""
        table.block_seconds += table.num_charged * (self.now - table.counted_at)
        table.counted_at = self.now

    def check_charges(self, holders: Collection[BlockTable], pinned: Counter[str]) -> None:
        """Assert that these are all holders, that every shared block has a name, and that each tenant is charged once
        for each block held for it, and for its `pinned` blocks.
        """
        self._allowances.check_integrity()
        uses = Counter(block for one in holders for block in one.blocks)
        shared = {block for block, count in uses.items() if count > 1}
        assert all(len(set(one.blocks)) == len(one.blocks) for one in holders), "a table has a block twice"
        assert all(self._cache.at(block) is not None for block in shared), "two own one block"
        assert len(shared) == self.num_shared, "shared blocks are miscounted"
        assert sum(uses.values()) == self.num_entries, "tables have another number of entries than is counted"
        held = Counter(tenant for tenant, _ in {(one.tenant, block) for one in holders for block in one.blocks})
        assert held + pinned == self._allowances.held, "a tenant is not charged for what it holds"
        charged: Counter[str] = Counter()
        for one in holders:
            assert one.num_shared == len(shared.intersection(one.blocks)), f"{one.owner} miscounts what it shares"
            charged[one.tenant] += one.num_charged
        assert +charged == held, "what is charged on accounts is not what tenants hold"
