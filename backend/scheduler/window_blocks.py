"""The blocks of layers that see a window alone: a sequence holds those that tokens to come see.

Each group of such layers (`backend.paged_kv.layer_groups`) has a block of its own for each place of a block table. They
are blocks like any others: charged to their tenant, named and cached when full, evicted and swapped one by one. What
the window has left behind is released once no step in flight reads it, so that a sequence holds as many of them as its
window is long, not as its text is.

A prefix hit may end only where the cached blocks of the window before its end are there as well. A sequence takes one
hit, whole, while it holds nothing: so it never holds more than its window and what steps in flight compute.
"""

from collections.abc import Iterable, Iterator
from weakref import ref

from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockName, WindowName
from backend.paged_kv.block_table import BlockTable
from backend.paged_kv.host_pool import HostBlock
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.batch import Batch
from backend.scheduler.holdings import Holdings
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.sequence import Sequence
from backend.scheduler.swapping import Swapping


class WindowBlocks:
    """Writes the window tables of sequences. A table has, for each place of the block table from `first` on, a block of
    each group.
    """

    def __init__(self, config: EngineConfig, cache: PrefixCache, holdings: Holdings, swapping: Swapping) -> None:
        self.num_groups = config.window_groups  # 0: no layer has such blocks
        self._config = config
        self._cache, self._holdings, self._swapping = cache, holdings, swapping
        self._untold: dict[Sequence, int] = {}  # the first place of each table that the device does not know

    def names_of(self, names: Iterable[BlockName]) -> Iterator[BlockName]:
        """Yield the names of the groups' blocks beside blocks of these names, place after place."""
        for name in names:
            known = [one() for one in name.windows] or [None] * self.num_groups
            windows = [WindowName(name) if one is None else one for one in known]
            if None in known:
                name.windows = tuple(map(ref, windows))
            yield from windows

    def with_windows(self, names: Iterable[BlockName]) -> list[BlockName]:
        """Return the names, each before those of the groups' blocks beside it."""
        return [one for name in names for one in (name, *self.names_of((name,)))]

    def own(self, sequence: Sequence, blocks: list[int]) -> list[int]:
        """Take new blocks for the next places of a sequence: the first of them are returned, for its block table."""
        count, table = len(blocks) // (1 + self.num_groups), self._table(sequence)
        place = len(sequence.block_table.blocks)
        self._holdings.own(table, blocks[count:])
        self._appended(sequence, table, place, len(blocks) - count)
        return blocks[:count]

    def trim(self, sequence: Sequence, hit: PrefixHit, step: int, from_host: bool) -> None:
        """Cut the hit of a sequence without blocks, for a row of this step, to its last end before which the window is
        cached, and add its blocks.
        """
        whole = end = hit.num_blocks
        found = list[list[CachedBlock | HostBlock]]()
        while end:
            hit.first_seen, found = self._config.first_seen(end * self._config.block_size), []
            for index in range(end - 1, hit.first_seen - 1, -1):
                at = self._at(sequence.block_names[index], step, from_host)
                if len(at) < self.num_groups:
                    end = index
                    break
                found.append(at)
            else:
                break
        hit.windows = [one for at in reversed(found) for one in at] if end else []
        if end < whole:
            hit.is_being_computed = False  # what is computed follows on a block that it does not have
            del hit.swapped[max(0, end - len(hit.blocks)) :]
            del hit.blocks[end:]
        for cached in hit.cached:
            hit.count(cached, sequence.tenant)
        hit.num_paid += hit.num_pinned

    def _at(self, name: BlockName, step: int, from_host: bool) -> list[CachedBlock | HostBlock]:
        found = list[CachedBlock | HostBlock]()
        for one in [one for known in name.windows if (one := known()) is not None]:
            cached = self._cache.named(one)
            if cached is not None and cached.step < step:
                found.append(cached)
            elif cached is None and from_host and (host_block := self._swapping.named(one)) is not None:
                found.append(host_block)
        return found

    def fork(self, leader: Sequence, end: int) -> tuple[int, list[CachedBlock]] | None:
        """Return what another sequence, which has no blocks, shares of the window of its leader, which completes its
        prompt: the first place, and the cached blocks before place `end`; None where it cannot.
        """
        table, groups = self._table(leader), self.num_groups
        first = self._config.first_seen(leader.num_prompt_tokens)
        if first < table.first:
            return None
        blocks = table.blocks[(first - table.first) * groups : (end - table.first) * groups]
        found = [
            cached for block in blocks if (cached := self._cache.at(block)) is not None and cached.name is not None
        ]
        return (first, found) if len(found) == len(blocks) else None

    def copies(self, leader: Sequence, sequence: Sequence) -> list[tuple[int, int]]:
        """Return the copies of the last place of the leader's window table to a forked sequence's own."""
        groups, place = self.num_groups, len(sequence.block_table.blocks) - 1
        table, own = self._table(leader), self._table(sequence)
        begin = (place - table.first) * groups
        return list(zip(table.blocks[begin : begin + groups], own.blocks[-groups:], strict=True))

    def take(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Let the sequence, which has no blocks, hold the cached blocks of the hit's window; `copy_back` puts the
        host's among them.
        """
        table = self._table(sequence)
        self._holdings.count_seconds(table)
        cached = [one for one in hit.windows if isinstance(one, CachedBlock)]
        for one in cached:
            self._holdings.share(table, one)
        self._holdings.append(table, [one.block for one in cached])
        self._appended(sequence, table, hit.first_seen, len(cached))

    def copy_back(self, sequence: Sequence, hit: PrefixHit, blocks: list[int], step: int) -> None:
        """Have the step copy the host's blocks of the hit's window to these."""
        table, brought = self._table(sequence), iter(blocks)
        self._holdings.own(table, blocks)
        table.blocks[:] = [one.block if isinstance(one, CachedBlock) else next(brought) for one in hit.windows]
        self._appended(sequence, table, hit.first_seen, len(table.blocks))
        for one, block in zip(hit.windows, table.blocks, strict=True):
            if isinstance(one, HostBlock):
                self._swapping.copy_back(one, block)
                self._cache.publish(one.name, block, step, table, is_copied=True)

    def publish(self, sequence: Sequence, first: int, last: int, step: int) -> None:
        """Name the blocks of the places from `first` to `last`, as far as they are held, which a step fills."""
        table, groups = self._table(sequence), self.num_groups
        first = max(first, table.first)
        if first < last and table.blocks:
            blocks = table.blocks[(first - table.first) * groups : (last - table.first) * groups]
            self._cache.publish_all(self.names_of(sequence.block_names[first:last]), blocks, step, table)

    def computed(self, sequence: Sequence, num_tokens: int) -> bool:
        """Release what no token behind `num_tokens` sees, which have been computed and fill blocks; True if that was
        something.
        """
        table, first = self._table(sequence), self._config.first_seen(num_tokens)
        count = (first - table.first) * self.num_groups
        if count <= 0 or not table.blocks:
            return False
        self._holdings.count_seconds(table)
        self._cache.begin_chain(table.tenant, self._holdings.now).is_behind = True
        self._holdings.leave(table, 0, count)
        table.first = first
        return True

    def distrust(self, sequence: Sequence) -> None:
        """Take the names from all blocks beside the sequence's text, those that its window has left included."""
        names = [beside for name in sequence.block_names for one in name.windows if (beside := one()) is not None]
        found = [self._cache.named(beside) for beside in names]
        cached = [block for block in found if block is not None]
        idle, table = [block for block in cached if not block.holders], BlockTable(sequence.id, sequence.tenant)
        for block in idle:  # without a name only what is held may be
            self._holdings.share(table, block)
        self._holdings.append(table, [block.block for block in idle])
        self._cache.invalidate(cached)
        self._holdings.leave(table)

    def growth(self, sequence: Sequence, places: int) -> int:
        """Return the blocks that a decode takes for `places` more, beside those that its window leaves meanwhile."""
        unfilled = self._config.window_need.decoding - len(self._table(sequence).blocks) // self.num_groups
        return places + self.num_groups * min(places, max(1, unfilled))

    def num_reclaimable(self, sequence: Sequence) -> int:
        """Return the blocks that freeing the sequence makes available."""
        table = self._table(sequence)
        return len(table.blocks) - table.num_shared

    def leave(self, sequence: Sequence) -> None:
        """Release the window of a sequence that no step in flight names, and the blocks of its text beside it, from the
        end on: a hit has no use for one without the other.
        """
        table, text = self._table(sequence), sequence.block_table
        self._untold.pop(sequence, None)
        self._holdings.count_seconds(table)
        for index in range(len(table.blocks) - self.num_groups, -1, -self.num_groups):
            self._holdings.leave(table, index)
            self._holdings.leave(text, table.first + index // self.num_groups)

    def plan(self, batch: Batch) -> None:
        """Tell the device what it does not know of the tables of sequences in slots."""
        for sequence, place in self._untold.items():
            table = self._table(sequence)
            if sequence.slot >= 0 and table.blocks:  # a row may be of one that this plan has preempted since
                first = max(place, table.first)
                told = table.blocks[(first - table.first) * self.num_groups :]
                batch.window_blocks.append((sequence.slot, first, told))
        self._untold.clear()

    def undo(self, holders: Iterable[Sequence], cut: dict[BlockTable, int]) -> None:
        """Have a sequence lose all blocks if it loses some by a lost step: of an earlier window nothing may be left.
        Every table is told again.
        """
        for holder in holders:
            table = self._table(holder)
            if table in cut or holder.block_table in cut:
                cut[table] = cut[holder.block_table] = 0
            self._untold[holder] = 0

    def _table(self, sequence: Sequence) -> BlockTable:
        if sequence.window_table is None:
            sequence.window_table = BlockTable(sequence.request.id, sequence.tenant)
        return sequence.window_table

    def _appended(self, sequence: Sequence, table: BlockTable, place: int, count: int) -> None:
        """Record that the table's last `count` blocks begin at this place."""
        if len(table.blocks) == count:
            table.first = place
        self._untold[sequence] = min(self._untold.get(sequence, place), place)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that each table ends where its sequence's block table ends, and holds no more than it may."""
        for sequence in sequences:
            table, end = self._table(sequence), len(sequence.block_table.blocks)
            assert len(table.blocks) == (end - table.first) * self.num_groups or not end, "a window has another end"
            assert end or not table.blocks, "a window is left without a sequence"
            most = self._config.window_need.most * self.num_groups
            assert len(table.blocks) <= most, "a sequence holds more than its window and what steps in flight compute"
