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
        self.num_groups = config.most_window_groups  # of any model; 0: no layer has such blocks
        self._config = config
        self._cache, self._holdings, self._swapping = cache, holdings, swapping
        self._untold: dict[Sequence, int] = {}  # the first place of each table that the device does not know

    def groups_of(self, sequence: Sequence) -> int:
        """Return the groups of the sequence's model."""
        return self._config.windows_of(sequence.request.model)[0] if self.num_groups else 0

    def names_of(self, names: Iterable[BlockName], groups: int) -> Iterator[BlockName]:
        """Yield the names of the groups' blocks beside blocks of these names, place after place."""
        for name in names:
            known = [one() for one in name.windows] or [None] * groups
            windows = [WindowName(name) if one is None else one for one in known]
            if None in known:
                name.windows = tuple(map(ref, windows))
            yield from windows

    def with_windows(self, names: Iterable[BlockName], groups: int) -> list[BlockName]:
        """Return the names, each before those of the groups' blocks beside it."""
        return [one for name in names for one in (name, *self.names_of((name,), groups))]

    def own(self, sequence: Sequence, blocks: list[int]) -> list[int]:
        """Take new blocks for the next places of a sequence: the first of them are returned, for its block table."""
        count, table = len(blocks) // (1 + self.groups_of(sequence)), sequence.block_table.of_window
        place = len(sequence.block_table.blocks)
        self._holdings.own(table, blocks[count:])
        self._appended(sequence, table, place, len(blocks) - count)
        return blocks[:count]

    def trim(self, sequence: Sequence, hit: PrefixHit, step: int, from_host: bool) -> None:
        """Cut the hit of a sequence without blocks, for a row of this step, to its last end before which the window is
        cached, and add its blocks.
        """
        whole = end = hit.num_blocks
        model, groups = sequence.request.model, self.groups_of(sequence)
        found = list[list[CachedBlock | HostBlock]]()
        while end:
            hit.first_seen, found = self._config.first_seen(end * self._config.block_size, model), []
            for index in range(end - 1, hit.first_seen - 1, -1):
                at = self._at(sequence.block_names[index], step, from_host)
                if len(at) < groups:
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
        table, groups = leader.block_table.of_window, self.groups_of(leader)
        first = self._config.first_seen(leader.num_prompt_tokens, leader.request.model)
        if first < table.first:
            return None
        blocks = table.blocks[(first - table.first) * groups : (end - table.first) * groups]
        found = [
            cached for block in blocks if (cached := self._cache.at(block)) is not None and cached.name is not None
        ]
        return (first, found) if len(found) == len(blocks) else None

    def copies(self, leader: Sequence, sequence: Sequence) -> list[tuple[int, int]]:
        """Return the copies of the last place of the leader's window table to a forked sequence's own."""
        groups, place = self.groups_of(sequence), len(sequence.block_table.blocks) - 1
        table, own = leader.block_table.of_window, sequence.block_table.of_window
        begin = (place - table.first) * groups
        return list(zip(table.blocks[begin : begin + groups], own.blocks[-groups:], strict=True))

    def take(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Let the sequence, which has no blocks, hold the cached blocks of the hit's window; `copy_back` puts the
        host's among them.
        """
        table = sequence.block_table.of_window
        self._holdings.count_seconds(table)
        cached = [one for one in hit.windows if isinstance(one, CachedBlock)]
        for one in cached:
            self._holdings.share(table, one)
        self._holdings.append(table, [one.block for one in cached])
        self._appended(sequence, table, hit.first_seen, len(cached))

    def copy_back(self, sequence: Sequence, hit: PrefixHit, blocks: list[int], step: int) -> None:
        """Have the step copy the host's blocks of the hit's window to these."""
        table, brought = sequence.block_table.of_window, iter(blocks)
        self._holdings.own(table, blocks)
        table.blocks[:] = [one.block if isinstance(one, CachedBlock) else next(brought) for one in hit.windows]
        self._appended(sequence, table, hit.first_seen, len(table.blocks))
        for one, block in zip(hit.windows, table.blocks, strict=True):
            if isinstance(one, HostBlock):
                self._swapping.copy_back(one, block)
                self._cache.publish(one.name, block, step, table, is_copied=True)

    def publish(self, sequence: Sequence, first: int, last: int, step: int, replaces: bool = False) -> list[BlockName]:
        """Name the blocks of the places from `first` to `last`, as far as they are held, which a step fills; returns
        the names. `replaces`: idle blocks of these names are freed.
        """
        table, groups = sequence.block_table.of_window, self.groups_of(sequence)
        for name in sequence.block_names[first : min(last, table.first)]:
            if not name.windows:  # named behind its window: who computes it fills as many blocks all the same
                list(self.names_of((name,), groups))
        first = max(first, table.first)
        if first >= last or not table.blocks:
            return []
        names = list(self.names_of(sequence.block_names[first:last], groups))
        blocks = table.blocks[(first - table.first) * groups : (last - table.first) * groups]
        if replaces:
            self._cache.replace_idle(names, blocks, table.tenant)
        self._cache.publish_all(names, blocks, step, table)
        return names

    def computed(self, sequence: Sequence, num_tokens: int) -> bool:
        """Release what no token behind `num_tokens` sees, which have been computed and fill blocks; True if that was
        something.

        The window before the end of its prompt may serve another answer to it, or a next turn whose template leaves
        parts of this answer out: only the rest is behind all windows that are asked for.
        """
        table, config, model = sequence.block_table.of_window, self._config, sequence.request.model
        first = config.first_seen(num_tokens, model)
        if first <= table.first or not table.blocks:
            return False
        self._holdings.count_seconds(table)
        end = (sequence.num_prompt_tokens - 1) // config.block_size
        seen = config.first_seen(end * config.block_size, model), sequence.num_prompt_tokens // config.block_size
        for place in sorted({first, *[min(max(one, table.first), first) for one in seen]}):
            if count := (place - table.first) * self.groups_of(sequence):
                is_behind = not seen[0] <= table.first < seen[1]
                self._cache.begin_chain(table.tenant, self._holdings.now).is_behind = is_behind
                self._holdings.leave(table, 0, count)
                table.first = place
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
        if not (groups := self.groups_of(sequence)):
            return places
        held = len(sequence.block_table.of_window.blocks) // groups
        return places + groups * min(places, max(1, self._config.need_of(sequence.request.model).decoding - held))

    def num_reclaimable(self, sequence: Sequence) -> int:
        """Return the blocks that freeing the sequence makes available."""
        table = sequence.block_table.of_window
        return len(table.blocks) - table.num_shared

    def leave(self, sequence: Sequence) -> None:
        """Release the window of a sequence that no step in flight names, and the blocks of its text beside it, from the
        end on: a hit has no use for one without the other.
        """
        table, text, groups = sequence.block_table.of_window, sequence.block_table, self.groups_of(sequence)
        self._untold.pop(sequence, None)
        self._holdings.count_seconds(table)
        for index in range(len(table.blocks) - groups, -1, -groups):
            self._holdings.leave(table, index)
            self._holdings.leave(text, table.first + index // groups)

    def plan(self, batch: Batch) -> None:
        """Tell the device what it does not know of the tables of the model's sequences in slots."""
        told = {one: place for one, place in self._untold.items() if one.request.model == batch.model}
        for sequence, place in told.items():
            table = sequence.block_table.of_window
            if sequence.slot >= 0 and table.blocks:  # a row may be of one that this plan has preempted since
                first = max(place, table.first)
                blocks = table.blocks[(first - table.first) * self.groups_of(sequence) :]
                batch.window_blocks.append((sequence.slot, first, blocks))
            del self._untold[sequence]

    def undo(self, holders: Iterable[Sequence], cut: dict[BlockTable, int]) -> None:
        """Have a sequence lose all blocks if it loses some by a lost step: of an earlier window nothing may be left.
        Every table is told again.
        """
        for holder in filter(self.groups_of, holders):
            table = holder.block_table.of_window
            if table in cut or holder.block_table in cut:
                cut[table] = cut[holder.block_table] = 0
            self._untold[holder] = 0

    def _appended(self, sequence: Sequence, table: BlockTable, place: int, count: int) -> None:
        """Record that the table's last `count` blocks begin at this place."""
        if len(table.blocks) == count:
            table.first = place
        self._untold[sequence] = min(self._untold.get(sequence, place), place)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that each table ends where its sequence's block table ends, and holds no more than it may."""
        for sequence in filter(self.groups_of, sequences):
            table, groups = sequence.block_table.of_window, self.groups_of(sequence)
            end = len(sequence.block_table.blocks)
            assert len(table.blocks) == (end - table.first) * groups or not end, "a window has another end"
            assert end or not table.blocks, "a window is left without a sequence"
            most = self._config.need_of(sequence.request.model).most * groups
            assert len(table.blocks) <= most, "a sequence holds more than its window and what steps in flight compute"
