"""Pins keep the cached prompt blocks of a waiting sequence, which holds no slot yet."""

from collections import Counter
from collections.abc import Callable, Collection

from backend.config import EngineConfig
from backend.paged_kv.block_table import BlockTable
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.allowances import Allowances
from backend.scheduler.holdings import Holdings
from backend.scheduler.pinned_prefixes import PinnedPrefixes
from backend.scheduler.sequence import Sequence

BLOCKS_PER_PINNED_BLOCK = 8  # one in eight blocks may be pinned for waiting sequences

FindBlocks = Callable[[Sequence, int], list[CachedBlock]]
"""Return the cached blocks of a sequence's tokens, for a row of a step."""


class Pins:
    """Pins the cached prompt blocks of waiting sequences.

    A pin is refused where pins, floors and pinned prefixes would leave too little memory for the longest sequence with
    the largest adapter, and to a tenant with a lease, whose running sequences may need all of it.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: PrefixCache,
        holdings: Holdings,
        allowances: Allowances,
        pinned_prefixes: PinnedPrefixes,
        find: FindBlocks,
    ) -> None:
        self._cache, self._holdings, self._allowances = cache, holdings, allowances
        self._pinned_prefixes, self._find = pinned_prefixes, find
        self._block_size = config.block_size
        self._most = config.num_blocks // BLOCKS_PER_PINNED_BLOCK
        self._most_kept = config.num_blocks - config.blocks_for(config.max_model_len)  # beside floors and prefixes
        self._most_of_adapter = 0  # blocks of the largest adapter of any sequence so far
        self._pins: dict[Sequence, BlockTable] = {}  # the newest last
        self._pinned: Counter[int] = Counter()  # pins that hold each block

    @property
    def num_blocks(self) -> int:
        return len(self._pinned)

    @property
    def all(self) -> Collection[BlockTable]:
        return self._pins.values()

    def of(self, tenant: str) -> list[Sequence]:
        """Return the tenant's waiting sequences with a pin."""
        return [sequence for sequence in self._pins if sequence.tenant == tenant]

    def expect(self, sequence: Sequence) -> bool:
        """Leave room for the sequence's adapter from now on; True if that is more than before."""
        adapter = sequence.request.adapter
        if adapter is None or adapter.num_blocks <= self._most_of_adapter:
            return False
        self._most_of_adapter = adapter.num_blocks
        return True

    def look_up(self, sequence: Sequence, step: int) -> list[CachedBlock]:
        """Return the cached prompt blocks that may be pinned while the sequence queues, all or none. Only their number
        is noted: the sequence may be refused.
        """
        found = self._pinnable(sequence, step)
        sequence.num_pinned_tokens = len(found) * self._block_size
        return found

    def pin(self, sequence: Sequence, found: list[CachedBlock]) -> None:
        """Pin the blocks just looked up for a waiting sequence, until `unpin`."""
        if not found:
            return
        blocks = [cached.block for cached in found]
        pin = self._pins[sequence] = BlockTable(sequence.id, sequence.tenant, counted_at=self._holdings.now)
        self._pinned.update(blocks)
        for cached in found:
            self._holdings.share(pin, cached)
        self._holdings.append(pin, blocks)

    def unpin(self, sequence: Sequence) -> None:
        """Drop the pin of a sequence, which has been admitted or has ended, and charge it the pin's block-seconds."""
        pin = self._pins.pop(sequence, None)
        if pin is None:
            return
        self._holdings.count_seconds(pin)
        sequence.block_table.block_seconds += pin.block_seconds
        sequence.num_pinned_tokens = 0
        self._forget(pin.blocks)
        self._cache.begin_chain(pin.tenant, self._holdings.now)
        self._holdings.leave(pin)
        self._pinned_prefixes.unpin_excess()

    def surplus(self) -> Sequence | None:
        """Return the newest pinned sequence where grown floors, pinned prefixes or adapters leave too little room for
        all pins: the head of the queue would wait for memory pinned for sequences behind it.
        """
        return next(reversed(self._pins)) if self._pins and len(self._pinned) > self._room else None

    def cut(self, table: BlockTable, index: int) -> None:
        """Forget the blocks from `index` on, which a lost step takes from the table, if it is a pin."""
        if table in self._pins.values():
            self._forget(table.blocks[index:])

    def were_cut(self) -> None:
        """Set `num_pinned_tokens` of waiting sequences after `cut`."""
        for sequence, pin in self._pins.items():
            sequence.num_pinned_tokens = len(pin.blocks) * self._block_size

    @property
    def _room(self) -> int:
        """Blocks left for pins beside floors, pinned prefixes and an adapter."""
        kept = self._cache.num_floor_blocks + self._pinned_prefixes.num_blocks
        return self._most_kept - kept - self._most_of_adapter

    def _pinnable(self, sequence: Sequence, step: int) -> list[CachedBlock]:
        found = self._find(sequence, step)
        if not found or self._allowances.allowed(sequence.tenant) is not None:
            return []
        more = sum([cached.block not in self._pinned for cached in found])
        return found if len(self._pinned) + more <= min(self._most, self._room) else []

    def _forget(self, blocks: list[int]) -> None:
        self._pinned.subtract(blocks)
        for block in blocks:
            if not self._pinned[block]:
                del self._pinned[block]

    def check_integrity(self) -> None:
        """Assert that only waiting sequences have pins, and that the pinned blocks are within their limit."""
        assert all(waiting.slot < 0 for waiting in self._pins), "blocks are kept for a sequence that runs"
        assert self._pinned == Counter(block for pin in self._pins.values() for block in pin.blocks), "lost a pin"
        assert not self._pinned or len(self._pinned) <= min(self._most, self._room), "too much is kept for who waits"
