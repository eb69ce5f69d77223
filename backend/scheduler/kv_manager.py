"""Who holds which slots and blocks of the device, and on whose account."""

from collections import Counter
from collections.abc import Collection, Iterable

from backend.config import EngineConfig, KVAllocation
from backend.paged_kv.block_pool import BlockPool, ContiguousPool, PagedPool
from backend.scheduler.allowances import Allowances, PassedOver
from backend.scheduler.batch import Counters
from backend.scheduler.sequence import FinishReason, Sequence, Status
from backend.scheduler.waiting_queue import WaitingQueue


class KVManager:
    """Hands slots and blocks to sequences and takes them back. It decides nothing; the scheduler is the only caller."""

    def __init__(self, config: EngineConfig) -> None:
        self.pool: BlockPool = _POOLS[config.kv_allocation](config.num_blocks)
        self.allowances = Allowances()
        self._config = config
        self.now = 0.0  # seconds of the engine's clock; whoever has a clock sets it
        self._contiguous = config.kv_allocation is KVAllocation.CONTIGUOUS
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def blocks_to_start(self, sequence: Sequence) -> int:
        """For all its tokens of now; contiguous: of the longest it may become, whose last token is never computed."""
        return self._config.blocks_for(sequence.most_tokens - 1 if self._contiguous else sequence.num_tokens)

    def blocks_to_grow(self, sequence: Sequence, length: int) -> int:
        """More than it holds, for `length` more computed tokens; 0 when it has room for them."""
        needed = self._config.blocks_for(sequence.num_computed_tokens + length) - len(sequence.block_table)
        return self.blocks_to_start(sequence) if self._contiguous and needed > 0 else max(needed, 0)

    def room_to_grow(self, sequence: Sequence, running: Collection[Sequence]) -> int:
        """Blocks that those running are to have left when it joins them, none of them more than it may come to need: so
        who was preempted is not back before all can get further than the last time.
        """
        if sequence.headroom == 1:
            return len(running)
        blocks_for, each = self._config.blocks_for, sequence.headroom
        return sum(min(each, blocks_for(s.most_tokens - 1) - len(s.block_table)) for s in running)

    def fit(self, sequence: Sequence, spare: int) -> bool:
        """Whether the blocks that it starts with are free, and `spare` beside them."""
        needed = self.blocks_to_start(sequence)
        if not self._contiguous:
            return self.pool.num_free >= needed + spare
        run = self.pool.allocate(needed)
        self.pool.release(run or [])
        return run is not None

    def seat(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()

    def give(self, sequence: Sequence, count: int) -> list[int] | None:
        """`count` more blocks at the end of its table, or None when they are not to be had."""
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self._count(sequence)
            sequence.block_table += blocks
            sequence.peak_blocks = max(sequence.peak_blocks, len(sequence.block_table))
            self.allowances.take(sequence.tenant, count)
        return blocks

    def take_back(self, sequence: Sequence) -> None:
        """All of it, slot and blocks."""
        self._count(sequence)
        self.pool.release(sequence.block_table)
        self.allowances.give(sequence.tenant, len(sequence.block_table))
        self._free_slots.append(sequence.slot)
        sequence.block_table, sequence.slot = [], -1

    def _count(self, sequence: Sequence) -> None:
        """Its block-seconds, before what it holds changes."""
        sequence.kv_block_seconds += len(sequence.block_table) * (self.now - sequence.held_since)
        sequence.held_since = self.now

    def check_integrity(self, holders: Collection[Sequence]) -> None:
        """Every block is free or owned by exactly one of `holders`, and charged to its tenant."""
        self.pool.check_integrity()
        self.allowances.check_integrity()
        owned = [block for s in holders for block in s.block_table]
        assert len(owned) == len(set(owned)), "two sequences own one block"
        assert len(owned) + self.pool.num_free == self._config.num_blocks, "blocks were lost"
        held = Counter(s.tenant for s in holders for _ in s.block_table)
        assert held == self.allowances.held, "a tenant is not charged for what it holds"
        slots = [s.slot for s in holders if s.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(self._config.max_num_seqs)), "slots were lost"


_POOLS: dict[KVAllocation, type[PagedPool] | type[ContiguousPool]] = {
    KVAllocation.PAGED: PagedPool,
    KVAllocation.CONTIGUOUS: ContiguousPool,
}


class ResidentSet:
    """Blocks and slot of a sequence that ends or is preempted are released when the last step in flight that names it
    completes, never earlier.
    """

    def __init__(
        self, config: EngineConfig, waiting: WaitingQueue, passed_over: PassedOver, counters: Counters
    ) -> None:
        self.kv_manager = KVManager(config)
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.leaving: dict[str, Sequence] = {}  # preempted, and named by steps in flight
        self._waiting = waiting
        self._passed_over = passed_over
        self._counters = counters

    def seat(self, sequence: Sequence) -> None:
        """It runs from now on, in a slot of its own and without blocks."""
        self.kv_manager.seat(sequence)
        sequence.status = Status.RUNNING
        sequence.num_admitted_tokens = sequence.num_tokens
        self.running[sequence.id] = sequence
        self._counters.joined += 1
        sequence.turn = self._counters.joined

    def suspend(self, sequence: Sequence) -> None:
        """It runs no more, and waits again once its memory is free."""
        sequence.status = Status.PREEMPTED
        del self.running[sequence.id]
        self.leaving[sequence.id] = sequence
        self._release_if_idle(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """It is over, whether it ran or not."""
        self.running.pop(sequence.id, None)
        self.leaving.pop(sequence.id, None)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._release_if_idle(sequence)

    def release(self, sequences: Iterable[Sequence]) -> None:
        """A step that named these is no longer in flight."""
        for sequence in sequences:
            if sequence.status is not Status.RUNNING:
                self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        """Free blocks and slot, unless a step in flight still names the sequence; a preempted one waits again."""
        if sequence.in_flight or sequence.slot < 0:
            return
        self.kv_manager.take_back(sequence)
        self._passed_over.look_again(sequence.tenant)
        if sequence.status is Status.PREEMPTED:
            self._counters.recomputed_tokens += sequence.num_computed_tokens
            sequence.num_computed_tokens = 0
            sequence.status = Status.WAITING
            del self.leaving[sequence.id]
            self._waiting.restore(sequence)

    def of(self, tenant: str) -> list[Sequence]:
        """Those of a tenant that run."""
        return [sequence for sequence in self.running.values() if sequence.tenant == tenant]

    def check_integrity(self, in_flight: Iterable[Sequence]) -> None:
        """Every slot and block is free, or held by exactly one sequence that runs, was preempted or is in flight."""
        self.kv_manager.check_integrity({*self.running.values(), *self.leaving.values(), *in_flight})
