"""Block tables: the KV blocks of each sequence, shared blocks, and the account that pays for each.

Sequences with a common prefix share its blocks. Each of their tenants is charged for a shared block once, on the
account of its first sequence that holds the block.
"""

from collections.abc import Callable, Collection, Iterable
from sys import maxsize
from typing import Protocol

from backend.adapter import AdapterBlockName
from backend.config import EngineConfig, KVAllocation
from backend.paged_kv.block_names import BlockName
from backend.paged_kv.block_pool import BlockPool, PagedPool, blocks_for
from backend.paged_kv.host_pool import HostBlock
from backend.paged_kv.prefix_cache import PrefixCache
from backend.scheduler.adapters import AdapterBlocks
from backend.scheduler.allowances import Allowances
from backend.scheduler.batch import Batch, Counters
from backend.scheduler.holdings import Holdings
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.pinned_prefixes import PinnedPrefixes
from backend.scheduler.prefix_hit import NO_HIT, PrefixHit
from backend.scheduler.retention import BetweenTurns
from backend.scheduler.scheduled_step import Fork
from backend.scheduler.sequence import FinishReason, Sequence
from backend.scheduler.swapping import Swapping
from backend.scheduler.window_blocks import WindowBlocks

POOLS: dict[KVAllocation, Callable[[int], BlockPool]] = {KVAllocation.PAGED: PagedPool}
"""The pools that can be chosen, by their number of blocks; other packages add theirs (`backend.extensions`)."""

BLOCKS_NAMED_AT_ONCE = 4  # blocks of output that are named together
# one in 1,024 blocks is evicted in advance: evicting a batch takes half the time per block
BLOCKS_PER_EVICTED_AHEAD = 1024
COPIED_TOKENS_PER_COMPUTED = 4  # by a step, for a sequence


class BlockNaming(Protocol):
    """Names blocks by their content."""

    def name(self, sequence: Sequence, num_blocks: int) -> None:
        """Name the first blocks of a sequence, whose tokens are known; a named block keeps its name."""
        ...


class BlockTables:
    """Allocates and frees the blocks of sequences. It holds no policy, and of steps knows only which have completed.

    Freed blocks with names stay in the prefix cache until evicted.
    """

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks, counters: Counters) -> None:
        retention = hooks.retention
        self.pool: BlockPool = POOLS[config.kv_allocation](config.num_blocks)
        self.cache = PrefixCache(self.pool, None if retention is None else retention.worth)
        self.allowances = Allowances()
        self.holdings = Holdings(self.pool, self.cache, self.allowances)
        self.pinned_prefixes = PinnedPrefixes(self.cache, self.allowances)
        self.names: BlockNaming | None = None  # of output blocks; None: only prompt blocks have names
        self.newly_named: list[tuple[Sequence, int]] = []  # freed sequences, and the index of a first new name
        self._config = config
        self.block_size = config.block_size
        self._contiguous = config.kv_allocation is KVAllocation.CONTIGUOUS
        self.shares_blocks = config.shares_blocks
        can_fill = config.max_table_entries < config.max_num_seqs * config.longest_blocks
        self._max_entries = config.max_table_entries - config.num_blocks if can_fill else maxsize  # room to grow
        self._evicted_ahead = config.num_blocks // BLOCKS_PER_EVICTED_AHEAD
        self.swapping = Swapping(config, hooks, self.cache, counters)
        self._swaps = config.num_host_blocks > 0
        self._most_copied = max(1, COPIED_TOKENS_PER_COMPUTED * config.max_num_batched_tokens // config.block_size)
        self.windows = WindowBlocks(config, self.cache, self.holdings, self.swapping)
        self.adapters = AdapterBlocks(self.pool, self.cache, self.holdings, self._unused, self._most_copied)
        self._found: list[tuple[int, Sequence, int, int]] = []  # hits in flight: step, sequence, tokens before, after
        self._counters = counters
        self.between_turns = BetweenTurns(self.cache, self.holdings, retention, config.block_size)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free or evictable."""
        return self.pool.num_free + self.cache.num_evictable

    def completed(self, step: int) -> None:
        """Record that a step has completed: the blocks it filled are valid."""
        self.cache.completed(step)
        self.adapters.completed(step)
        if self._found and self._found[0][0] <= step:
            certain = [found for found in self._found if found[0] <= step]
            self._counters.cached_tokens += sum(after - before for _, _, before, after in certain)
            self._found = [found for found in self._found if found[0] > step]

    def plan_copies(self, batch: Batch) -> None:
        """Have a step make the copies from and to the host that are due."""
        if self._swaps:
            self.swapping.plan(batch)
        if self.adapters.num_due:
            self.adapters.plan(batch)
        if self.windows.num_groups:
            self.windows.plan(batch)

    def blocks_to_start(self, sequence: Sequence) -> int:
        """Return the blocks for all tokens of the sequence; contiguous: for its maximum length.

        The last token is never computed, so it needs no memory.
        """
        tokens = sequence.request.most_tokens - 1 if self._contiguous else sequence.num_tokens
        return self._config.kv_blocks(tokens, sequence.request.model)

    def blocks_to_grow(self, sequence: Sequence, length: int) -> int:
        """Return the blocks that `length` more computed tokens need beyond the block table."""
        needed = blocks_for(sequence.num_computed_tokens + length, self.block_size) - len(sequence.block_table.blocks)
        if needed <= 0:
            return 0
        return self.blocks_to_start(sequence) if self._contiguous else needed * (1 + self.windows.groups_of(sequence))

    def one_place_each(self, sequences: Collection[Sequence]) -> int:
        """Return the blocks of a place in the block table of each of these, with those of its groups of layers."""
        if not self.windows.num_groups:
            return len(sequences)
        return sum([1 + self.windows.groups_of(one) for one in sequences])

    def watermark_blocks(self, sequence: Sequence, running: Collection[Sequence]) -> int:
        """Return the free blocks that running sequences keep when `sequence` is admitted.

        Each running sequence is left the watermark of `sequence`, at most its own remaining need. The watermark doubles
        at each preemption of `sequence` for memory, so that all get further each time it returns.
        """
        each, size = sequence.watermark, self.block_size
        if each == 1:
            return self.one_place_each(running)
        places = [min(each, blocks_for(s.request.most_tokens - 1, size) - len(s.block_table.blocks)) for s in running]
        if not self.windows.num_groups:
            return sum(places)
        return sum([self.windows.growth(s, count) for s, count in zip(running, places, strict=True)])

    def can_allocate(self, sequence: Sequence, hit: PrefixHit, watermark_blocks: int) -> bool:
        """Return True if the blocks of the sequence and `watermark_blocks` beside them are available."""
        blocks = self.blocks_to_start(sequence)
        needed = blocks - hit.num_held + self.adapters.num_needed(sequence)
        if (hit.blocks or hit.swapped) and self.holdings.num_entries + blocks > self._max_entries:
            return False
        if not self._contiguous:
            return self.num_available >= needed + watermark_blocks
        run = self.pool.allocate(needed)
        self.pool.release(run or [])
        return run is not None

    def allocate(self, sequence: Sequence, count: int) -> list[int] | None:
        """Append `count` blocks to the block table and return them, those for the window left out; None if too few are
        available.

        Idle blocks are evicted first where free blocks are lacking.
        """
        blocks = self._unused(count)
        if blocks is not None:
            if self.windows.groups_of(sequence):
                blocks = self.windows.own(sequence, blocks)
            self.holdings.own(sequence.block_table, blocks)
        return blocks

    def _unused(self, count: int) -> list[int] | None:
        lacking = count - self.pool.num_free
        if lacking > 0:
            if lacking > self.cache.num_evictable:
                return None
            self.cache.evict(lacking + self._evicted_ahead)
        return self.pool.allocate(count)

    def num_reclaimable(self, sequence: Sequence) -> int:
        """Return the blocks that freeing the sequence makes available: its unshared ones."""
        table, adapter = sequence.block_table, sequence.adapter_table
        own = 0 if adapter is None else len(adapter.blocks) - adapter.num_shared
        own += self.windows.num_reclaimable(sequence) if self.windows.groups_of(sequence) else 0
        return len(table.blocks) - table.num_shared + own

    # shared blocks

    def find(self, sequence: Sequence, step: int, *, from_host: bool = True) -> PrefixHit:
        """Return the prefix hit of the sequence behind its block table, for a row of this step.

        The last token is left out, so that a row remains to sample the next token from; so are blocks that the same
        step fills, because rows of one step are computed in no order.

        With windows a sequence has one hit, where it holds no blocks. It ends where a window ends, and before the
        host's blocks if not all of them may be copied by this step.
        """
        names, size, index = sequence.block_names, self.block_size, len(sequence.block_table.blocks)
        most, groups = min(len(names), (sequence.num_tokens - 1) // size), self.windows.groups_of(sequence)
        if index >= most or not self.shares_blocks or sequence.num_computed_tokens != index * size:
            return NO_HIT
        if groups and index:
            return NO_HIT
        from_host = from_host and self._swaps
        if self.cache.named(names[index]) is None and not (from_host and self.swapping.named(names[index])):
            return NO_HIT
        hit, tenant, most_copied = PrefixHit(), sequence.tenant, self._most_copied * (1 + groups)  # they are smaller
        for position in range(index, most):
            cached = self.cache.named(names[position])
            if cached is None:
                if from_host:
                    hit.swapped = self._find_swapped(names[position : min(most, position + most_copied + 1)])
                break
            if cached.step >= step:
                hit.is_being_computed = True
                break
            hit.blocks.append(cached)
            if not groups:
                hit.count(cached, tenant)
        if groups:
            self.windows.trim(sequence, hit, step, from_host)
            return hit if hit.num_copied <= most_copied else self.find(sequence, step, from_host=False)
        hit.cut(most_copied)
        hit.num_paid += hit.num_pinned
        return hit

    def permits(self, tenant: str, blocks: int, hit: PrefixHit = NO_HIT) -> bool:
        """Return True if the tenant may hold `blocks` more. Its pinned prefixes, except those of the hit, give way."""
        if self.cache.num_pinned:
            self.pinned_prefixes.give_way(tenant, blocks, hit.cached)
        return self.allowances.permits(tenant, blocks)

    def take_hit(self, sequence: Sequence, hit: PrefixHit, step: int) -> list[int]:
        """Append the hit's blocks to the block table, and count their tokens as computed.

        The step copies swapped blocks back from the host, as far as blocks can be allocated.
        """
        table, groups = sequence.block_table, self.windows.groups_of(sequence)
        if groups and (copied := hit.num_copied):
            idle = hit.num_held_blocks - copied - hit.num_held
            if copied + idle > self.num_available:  # without the host's blocks the window is another
                hit = self.find(sequence, step, from_host=False)
                if not self.permits(sequence.tenant, hit.num_held_blocks - hit.num_paid, hit):
                    hit = NO_HIT
        self.holdings.count_seconds(table)
        for cached in hit.blocks:
            self.holdings.share(table, cached)
        blocks = [cached.block for cached in hit.blocks]
        self.holdings.append(table, blocks)
        if groups and hit.num_blocks:
            self.windows.take(sequence, hit)
        if hit.num_copied:
            blocks += self._copy_back(sequence, hit, step)
        self._found_up_to(sequence, len(table.blocks) * self.block_size, step)
        return blocks

    def fork(self, sequence: Sequence, hit: PrefixHit, step: int) -> None:
        """Append all blocks of the prompt to the block table: the hit's, and one of its own for the last partial block.
        The caller has made sure that it can be allocated.
        """
        self.take_hit(sequence, hit, step)
        if len(sequence.block_table.blocks) < blocks_for(sequence.num_prompt_tokens, self.block_size):
            blocks = self.allocate(sequence, 1 + self.windows.groups_of(sequence))
            assert blocks is not None, "a fork finds no room for a block"
        self._found_up_to(sequence, sequence.num_prompt_tokens, step)

    def _found_up_to(self, sequence: Sequence, num_tokens: int, step: int) -> None:
        """Record that the sequence has its first tokens from the cache, unless the step is lost."""
        sequence.num_computed_tokens = num_tokens
        before, after = sequence.num_prefilled_tokens, min(num_tokens, sequence.num_prompt_tokens)
        if after > before:
            sequence.num_prefilled_tokens = after
            sequence.num_cached_tokens += after - before
            self._found.append((step, sequence, before, after))

    def _copy_back(self, sequence: Sequence, hit: PrefixHit, step: int) -> list[int]:
        """Allocate blocks to which the step copies the hit's swapped ones; none where too few are available."""
        swapped = hit.swapped
        windows = [one for one in hit.windows if isinstance(one, HostBlock)] if hit.windows else []
        with self.swapping.keeping([*swapped, *windows]):  # eviction may drop other blocks of the host
            blocks = self._unused(len(swapped) + len(windows))
        if blocks is None:
            assert not self.windows.groups_of(sequence), "a window is found and has no room"
            return []
        if windows:
            self.windows.copy_back(sequence, hit, blocks[len(swapped) :], step)
            del blocks[len(swapped) :]
        self.holdings.own(sequence.block_table, blocks)
        for host_block, block in zip(swapped, blocks, strict=True):
            self.swapping.copy_back(host_block, block)
            self.cache.publish(host_block.name, block, step, sequence.block_table, is_copied=True)
        return blocks

    def _find_swapped(self, names: list[BlockName]) -> list[HostBlock]:
        """Return the host blocks of the longest prefix of `names`."""
        found: list[HostBlock] = []
        for name in names:
            host_block = self.swapping.named(name)
            if host_block is None or self.cache.named(name) is not None:
                break
            found.append(host_block)
        return found

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Set the tenant's allowance, of which only running sequences may take blocks; None: no limit."""
        self.allowances.allow(tenant, blocks)
        if blocks is not None:
            self.pinned_prefixes.allowed(tenant)

    def publish(self, sequence: Sequence, start: int, step: int) -> None:
        """Name the blocks that a row of this step fills, from the sequence's token `start` on.

        Names not reported yet (`newly_named`) are not used, even where known: plans depend on reported names alone.
        """
        names, table = sequence.block_names, sequence.block_table
        if not names or not self.shares_blocks:
            return
        size = self.block_size
        first, last = start // size, min(sequence.block_table.num_told_names, sequence.num_computed_tokens // size)
        if first < last:
            filled = names[first:last]
            self.cache.publish_all(filled, table.blocks[first:last], step, table)
            if self.windows.groups_of(sequence):
                filled = [*filled, *self.windows.publish(sequence, first, last, step)]
            if self._swaps:
                self.swapping.computed(filled)

    def undo_from(self, step: int, forks: Iterable[Fork], holders: Iterable[Sequence]) -> None:
        """Undo the effects of this lost step and all later ones on the block tables of `holders`, whose rows are undone
        already.

        A holder of a block that a lost step was to fill loses it and all blocks behind it; a sequence forked by a lost
        step returns to its earlier blocks.
        """
        lost = [one for one in self.cache.uncomputed(step) if not isinstance(one.name, AdapterBlockName)]
        self.adapters.undo_from(step)
        # by table, the index of the first block that it loses
        cut = {forked.block_table: num_blocks for forked, _, num_blocks in forks}
        for cached in lost:
            tables = list(cached.holders)
            if not cached.is_copied:
                del tables[:1]  # its first holder computes it again; a copy from the host is made by no holder's rows
            for table in tables:
                cut[table] = min(table.blocks.index(cached.block), cut.get(table, maxsize))
        if self.windows.num_groups:
            self.windows.undo(holders, cut)
        self.swapping.undo_from(step)
        self.cache.invalidate(lost)  # first: a block with a name would become idle below, for others to find
        for table, index in cut.items():
            self.holdings.count_seconds(table)
            self.cache.begin_chain(table.tenant, self.holdings.now)
            self.holdings.leave(table, index)
        for holder in holders:
            kept = len(holder.block_table.blocks) * self.block_size
            holder.num_computed_tokens = min(holder.num_computed_tokens, kept)
        self.pinned_prefixes.unpin_excess()
        for _, sequence, before, after in self._found:
            undone = after - max(before, cut.get(sequence.block_table, maxsize) * self.block_size)
            if undone > 0:
                sequence.num_prefilled_tokens -= undone
                sequence.num_cached_tokens -= undone
        self._found = []
        for cached in [one for one in lost if one.holders]:  # by now the first holders alone
            self.cache.forget(cached)

    def name_known(self, sequence: Sequence) -> None:
        """Name full blocks of known tokens, a few at a time: naming all of a long output at its end would stall."""
        known = (sequence.num_prompt_tokens + len(sequence.output)) // self.block_size
        if self.shares_blocks and known >= len(sequence.block_names) + BLOCKS_NAMED_AT_ONCE:
            self._name(sequence, known)

    def _name(self, sequence: Sequence, num_blocks: int) -> None:
        if self.names is not None:
            self.names.name(sequence, num_blocks)

    def publish_all(self, sequence: Sequence) -> bool:
        """Name every full block of accepted and computed tokens of a sequence that is about to be freed.

        Return True if other sequences may share them: the blocks of a failed sequence are never shared.
        """
        if not self.shares_blocks or sequence.finish_reason is FinishReason.FAILED:
            return False
        known = sequence.num_prompt_tokens + len(sequence.output)
        full = min(sequence.num_computed_tokens, known) // self.block_size
        self._name(sequence, full)
        names, told = sequence.block_names, sequence.block_table.num_told_names
        if len(names) > told:
            self.newly_named.append((sequence, told))
            sequence.block_table.num_told_names = len(names)
        last = min(full, len(names))
        table = sequence.block_table
        if self.windows.groups_of(sequence):
            # what was cached without its window was computed again: as new as the window, once no step can be lost
            if replaces := sequence.last_step <= self.cache.completed_step:
                self.cache.replace_idle(names[:last], table.blocks[:last], table.tenant)
            self.windows.publish(sequence, 0, last, sequence.last_step, replaces)
        self.cache.publish_all(names[:last], table.blocks[:last], sequence.last_step, table)
        return True

    def free(self, sequence: Sequence, *, is_published: bool = False) -> None:
        """Free all blocks of a sequence with no step in flight."""
        if not is_published or self.windows.groups_of(sequence):  # again, to replace what a step in flight could not
            self.publish_all(sequence)
        self.holdings.count_seconds(sequence.block_table)
        self.between_turns.leaves(sequence, is_named=self.shares_blocks)
        if self.windows.groups_of(sequence):
            self.windows.leave(sequence)
        self.holdings.leave(sequence.block_table)
        self.pinned_prefixes.unpin_excess()
        if sequence.adapter_table is not None:  # last: its blocks are a chain of their own
            self.adapters.leave(sequence)

    def distrust(self, sequence: Sequence) -> None:
        cached = [self.cache.at(block) for block in sequence.block_table.blocks]
        self.cache.invalidate([one for one in cached if one is not None])
        if self.windows.groups_of(sequence):
            self.windows.distrust(sequence)

    def check_blocks(self, sequences: Collection[Sequence]) -> None:
        """Assert that every block is free, idle, or held by some of these sequences; and the integrity of each part."""
        holders = [table for sequence in sequences for table in sequence.tables]
        self.adapters.check_integrity(sequences)
        if self.windows.num_groups:
            self.windows.check_integrity(sequences)
        self.pool.check_integrity()
        self.holdings.check_charges(holders, self.pinned_prefixes.idle_by_tenant())
        self.pinned_prefixes.check_integrity()
        self.swapping.host.check_integrity()
        self.cache.check_blocks((block, one) for one in holders for block in one.blocks)
        num_held = len({block for one in holders for block in one.blocks})
        assert num_held + self.cache.num_idle + self.pool.num_free == self._config.num_blocks, "blocks were lost"
