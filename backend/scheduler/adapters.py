"""The blocks of KV memory in which adapters' weights lie, and their holders: the sequences that run with each.

They are cached blocks as those of prompts are: held by sequences, each of whose tenants is charged once; idle when the
last has left, and evicted by the same order; brought back from the host's copy of the weights when a sequence asks
again. So an adapter needs no memory of its own, and no number of adapters is fixed.
"""

from collections.abc import Callable, Iterable

from backend.adapter import Adapter, AdapterBlockName
from backend.paged_kv.block_pool import BlockPool
from backend.paged_kv.prefix_cache import PrefixCache
from backend.scheduler.batch import Batch
from backend.scheduler.holdings import Holdings
from backend.scheduler.sequence import Sequence

_Copy = tuple[int, int, int, AdapterBlockName]
"""A copy from the host: number of the adapter, index of a block of its weights, block of the pool, and its name."""


class AdapterBlocks:
    """Gives sequences the blocks of their adapters, and steps the copies that bring them to the device."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        holdings: Holdings,
        allocate: Callable[[int], list[int] | None],
        most_copied: int,
    ) -> None:
        """`allocate` returns unused blocks, after evictions. `most_copied`: blocks that a step brings to the device
        before it passes over sequences that need more; the first adapter of a step is always brought.
        """
        self._pool, self._cache, self._holdings = pool, cache, holdings
        self._allocate, self._most_copied = allocate, most_copied
        self.users: dict[Adapter, int] = {}  # sequences in slots, by adapter
        self._due: list[_Copy] = []  # that no step carries out yet
        self._in_flight: list[tuple[int, list[_Copy]]] = []  # by step
        self.num_copied = 0  # blocks brought by the step being planned; each plan begins at 0

    @property
    def num_due(self) -> int:
        return len(self._due)

    def num_lacking(self, adapter: Adapter) -> int:
        """Return the adapter's blocks that are not on the device."""
        named = self._cache.named
        return sum([named(name) is None for name in adapter.block_names])

    def num_needed(self, sequence: Sequence) -> int:
        """Return the available blocks that admission takes for the adapter: those on which no sequence holds."""
        adapter = sequence.request.adapter
        if adapter is None or adapter in self.users:
            return 0
        return adapter.num_blocks

    def num_unpaid(self, sequence: Sequence) -> int:
        """Return the adapter's blocks that the sequence's tenant is not charged for yet."""
        adapter = sequence.request.adapter
        if adapter is None:
            return 0
        cached = [self._cache.named(name) for name in adapter.block_names]
        return sum([one is None or one.payer(sequence.tenant) is None for one in cached])

    def num_in_use(self, sequence: Sequence) -> int:
        """Return the blocks of the adapters of running sequences and of this one."""
        return sum([adapter.num_blocks for adapter in self.users]) + self.num_needed(sequence)

    def has_to_wait(self, sequence: Sequence) -> bool:
        """Return True if the step already brings enough blocks of adapters: this sequence's are left for the next."""
        adapter = sequence.request.adapter
        if adapter is None or not self.num_copied:
            return False
        return self.num_copied + self.num_lacking(adapter) > self._most_copied

    def take(self, sequence: Sequence, step: int) -> None:
        """Let a sequence hold its adapter from this step on, which brings what is lacking of it. The caller has made
        sure that its blocks can be allocated.
        """
        table, adapter = sequence.adapter_table, sequence.request.adapter
        assert table is not None and adapter is not None
        self.users[adapter] = self.users.get(adapter, 0) + 1
        self._holdings.count_seconds(table)
        found = [self._cache.named(name) for name in adapter.block_names]
        for cached in found:
            if cached is not None:
                self._holdings.share(table, cached)
        self._holdings.append(table, [cached.block for cached in found if cached is not None])
        lacking = [index for index, cached in enumerate(found) if cached is None]
        if not lacking:
            return
        blocks = self._allocate(len(lacking))
        assert blocks is not None, "an adapter finds no room"
        self._holdings.own(table, blocks)
        brought = dict(zip(lacking, blocks, strict=True))
        table.blocks[:] = [brought[index] if cached is None else cached.block for index, cached in enumerate(found)]
        for index, block in brought.items():
            name = adapter.block_names[index]
            self._cache.publish(name, block, step, table, is_copied=True)
            self._due.append((adapter.number, index, block, name))
        self.num_copied += len(lacking)

    def leave(self, sequence: Sequence) -> None:
        """Release the adapter of a sequence that no step in flight names."""
        table, adapter = sequence.adapter_table, sequence.request.adapter
        if table is None or adapter is None or not table.blocks:
            return
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]
            self._forget_coming(adapter)
        self._holdings.count_seconds(table)
        self._cache.begin_chain(table.tenant, self._holdings.now)
        self._holdings.leave(table)

    def _forget_coming(self, adapter: Adapter) -> None:
        """Take the names from blocks that no completed step has brought: without a holder they would be cached, and
        evicted, before they are on the device.
        """
        coming = self._due + [copy for _, copies in self._in_flight for copy in copies]
        found = [self._cache.named(name) for number, _, _, name in coming if number == adapter.number]
        self._cache.invalidate([cached for cached in found if cached is not None])

    def plan(self, batch: Batch) -> None:
        """Have a step make the copies that are due, except to blocks that were evicted meanwhile."""
        named, due = self._cache.named, list[_Copy]()
        for copy in self._due:
            cached = named(copy[3])
            if cached is not None and cached.block == copy[2]:
                due.append(copy)
        batch.adapter_blocks = [(number, index, block) for number, index, block, _ in due]
        self._in_flight.append((batch.step, due))
        self._due = []

    def completed(self, step: int) -> None:
        if self._in_flight and self._in_flight[0][0] <= step:
            self._in_flight = [planned for planned in self._in_flight if planned[0] > step]

    def undo_from(self, step: int) -> None:
        """Have the copies of this lost step and all later ones made again: their blocks keep their holders."""
        lost = [copy for planned, copies in self._in_flight if planned >= step for copy in copies]
        self._in_flight = [planned for planned in self._in_flight if planned[0] < step]
        self._due = [*lost, *self._due]

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Assert that each of these sequences, which hold slots, holds its adapter's blocks, and no other does."""
        counts: dict[Adapter, int] = {}
        for sequence in holders:
            adapter, table = sequence.request.adapter, sequence.adapter_table
            if adapter is None or table is None or not table.blocks:
                continue
            counts[adapter] = counts.get(adapter, 0) + 1
            cached = [self._cache.named(name) for name in adapter.block_names]
            assert [None if one is None else one.block for one in cached] == table.blocks, "an adapter has other blocks"
        assert counts == self.users, "an adapter has another number of users than is counted"
