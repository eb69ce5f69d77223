"""The KV manager knows which sequences hold which slots and blocks of the device, and on whose account.

A slot is a sequence's row of device state, a block is `block_size` tokens of KV memory.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from sys import maxsize

from backend.config import EngineConfig, KVAllocation
from backend.paged_kv.block_pool import BlockPool, ContiguousPool, PagedPool, blocks_for
from backend.scheduler.batch import Counters
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.scheduler.waiting_queue import WaitingQueue

_RUNNING, _PREEMPTED = SequenceStatus.RUNNING, SequenceStatus.PREEMPTED
"""In Python 3.11 looking a member up in an enum takes as long as three calls; steps ask for each of their rows."""

_POOLS: dict[KVAllocation, type[PagedPool] | type[ContiguousPool]] = {
    KVAllocation.PAGED: PagedPool,
    KVAllocation.CONTIGUOUS: ContiguousPool,
}


class Allowances:
    """Counts the blocks that each tenant holds, and those that it may hold: any number, unless `allow` says otherwise.

    What a tenant may hold is a lease that the gateway renews; planning reads it and never waits for it. Blocks are
    charged as they are allocated and credited as they are freed. A lease may be cut below what is held: nothing is
    taken away for that, but nothing more is allocated either until enough has been freed.
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.requested: dict[str, int] = {}  # by tenants that were denied blocks, all that they would hold
        self._allowed: dict[str, int] = {}

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Let the tenant hold this many blocks from now on; None: any number."""
        if blocks is None:
            self._allowed.pop(tenant, None)
        else:
            self._allowed[tenant] = blocks
        self.requested.pop(tenant, None)

    def allowed(self, tenant: str) -> int | None:
        return self._allowed.get(tenant)

    def permits(self, tenant: str, blocks: int) -> bool:
        """Return True if the tenant may hold `blocks` more."""
        return not self._allowed or self.permits_in_all(tenant, self.held[tenant] + blocks)

    def permits_in_all(self, tenant: str, blocks: int) -> bool:
        """Return True if the tenant may come to hold `blocks` altogether; a denial is remembered in `requested`."""
        if blocks <= self._allowed.get(tenant, maxsize):
            return True
        self.requested[tenant] = max(blocks, self.requested.get(tenant, 0))
        return False

    def charge(self, tenant: str, blocks: int) -> None:
        self.held[tenant] += blocks

    def credit(self, tenant: str, blocks: int) -> None:
        self.held[tenant] -= blocks
        if not self.held[tenant]:
            del self.held[tenant]

    def check_integrity(self) -> None:
        assert all(blocks > 0 for blocks in self.held.values()), "a tenant holds less than nothing"


class HeldTenants:
    """The tenants that the queue holds back at a limit of their own; the queue hears of changes alone."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.reasons: dict[str, WaitReason] = {}  # by tenant, the limit that was met
        self._waiting = waiting

    def hold(self, tenant: str, reason: WaitReason) -> None:
        self.reasons[tenant] = reason
        self._waiting.hold(tenant, reason)

    def resume(self, tenant: str) -> None:
        """Let the queue offer the tenant's sequences again, if it was held: something has changed for it."""
        if self.reasons.pop(tenant, None) is not None:
            self._waiting.hold(tenant, None)


class KVManager:
    """Gives sequences their slots and blocks, and frees them. It decides nothing: the scheduler is its only caller.

    Blocks and slot of a sequence that ends or is preempted are freed when the last step in flight that names it
    completes, never earlier: until then the device may still write to them.
    """

    def __init__(
        self, config: EngineConfig, waiting: WaitingQueue, held_tenants: HeldTenants, counters: Counters
    ) -> None:
        self.pool: BlockPool = _POOLS[config.kv_allocation](config.num_blocks)
        self.allowances = Allowances()
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.freeing: dict[str, Sequence] = {}  # preempted, and named by steps in flight
        self.now = 0.0  # seconds of the engine's clock; whoever has a clock sets it
        self.completed_step = -1  # the newest step that is no longer in flight; the scheduler sets it
        self._config = config
        self._block_size = config.block_size
        self._contiguous = config.kv_allocation is KVAllocation.CONTIGUOUS
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._leaving: set[Sequence] = set()  # ended or preempted, and named by steps in flight
        self._waiting = waiting
        self._held_tenants = held_tenants
        self._counters = counters

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def running_of(self, tenant: str) -> list[Sequence]:
        """Return the tenant's running sequences, in the order of their admission."""
        return [sequence for sequence in self.running.values() if sequence.tenant == tenant]

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return True if a step in flight names the sequence."""
        return sequence.last_step > self.completed_step

    # blocks

    def blocks_to_start(self, sequence: Sequence) -> int:
        """Return the blocks for all tokens that the sequence has; contiguous: that it may ever have.

        The last token is never computed, so it needs no memory.
        """
        return blocks_for(sequence.most_tokens - 1 if self._contiguous else sequence.num_tokens, self._block_size)

    def blocks_to_grow(self, sequence: Sequence, length: int) -> int:
        """Return how many blocks `length` more computed tokens need beyond those that the sequence holds."""
        needed = blocks_for(sequence.num_computed_tokens + length, self._block_size) - len(sequence.block_table)
        if needed <= 0:
            return 0
        return self.blocks_to_start(sequence) if self._contiguous else needed

    def watermark_blocks(self, sequence: Sequence, running: Collection[Sequence]) -> int:
        """Return how many blocks must stay free for those running when `sequence` is admitted.

        Each is left as many as the watermark of `sequence` says, and none more than it may come to need. The watermark
        doubles whenever others took the memory of `sequence`, so that all can get further each time it returns.
        """
        if sequence.watermark == 1:
            return len(running)
        each, size = sequence.watermark, self._block_size
        return sum(min(each, blocks_for(s.most_tokens - 1, size) - len(s.block_table)) for s in running)

    def can_allocate(self, sequence: Sequence, watermark_blocks: int) -> bool:
        """Return True if the blocks that the sequence starts with are free, and `watermark_blocks` beside them."""
        needed = self.blocks_to_start(sequence)
        if not self._contiguous:
            return self.pool.num_free >= needed + watermark_blocks
        run = self.pool.allocate(needed)
        self.pool.release(run or [])
        return run is not None

    def allocate(self, sequence: Sequence, count: int) -> list[int] | None:
        """Append `count` blocks to the sequence's block table and return them; None when so many are not free."""
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self._count_block_seconds(sequence)
            sequence.block_table += blocks
            sequence.peak_blocks = max(sequence.peak_blocks, len(sequence.block_table))
            self.allowances.charge(sequence.tenant, count)
        return blocks

    # a sequence's way through the batch

    def admit(self, sequence: Sequence) -> None:
        """Let the sequence run from now on, in a slot of its own and without blocks yet."""
        sequence.slot = self._free_slots.pop()
        sequence.status = _RUNNING
        sequence.num_admitted_tokens = sequence.num_tokens
        self.running[sequence.id] = sequence
        self._counters.admissions += 1
        sequence.admission_number = self._counters.admissions

    def preempt(self, sequence: Sequence) -> None:
        """Take the sequence out of the batch; it waits again once its memory is free."""
        sequence.status = _PREEMPTED
        del self.running[sequence.id]
        self.freeing[sequence.id] = sequence
        self._free_if_idle(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End the sequence, whether it ran or not."""
        self.running.pop(sequence.id, None)
        self.freeing.pop(sequence.id, None)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._free_if_idle(sequence)

    def free_idle(self, sequences: Iterable[Sequence]) -> None:
        """Free what may be freed now that a step which named these sequences is no longer in flight."""
        if self._leaving:
            for sequence in sequences:
                if sequence.status is not _RUNNING:
                    self._free_if_idle(sequence)

    def _free_if_idle(self, sequence: Sequence) -> None:
        """Free blocks and slot, unless a step in flight still names the sequence; a preempted one waits again."""
        if sequence.slot < 0:
            return
        if self.is_in_flight(sequence):
            self._leaving.add(sequence)
            return
        self._leaving.discard(sequence)
        self._free(sequence)
        self._held_tenants.resume(sequence.tenant)
        if sequence.status is _PREEMPTED:
            self._counters.recomputed_tokens += sequence.num_computed_tokens
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
            del self.freeing[sequence.id]
            self._waiting.restore(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._count_block_seconds(sequence)
        self.pool.release(sequence.block_table)
        self.allowances.credit(sequence.tenant, len(sequence.block_table))
        self._free_slots.append(sequence.slot)
        sequence.block_table, sequence.slot = [], -1

    def _count_block_seconds(self, sequence: Sequence) -> None:
        """Add up the sequence's block-seconds, before what it holds changes."""
        sequence.kv_block_seconds += len(sequence.block_table) * (self.now - sequence.held_since)
        sequence.held_since = self.now

    def check_integrity(self, in_flight: Iterable[Sequence]) -> None:
        """Assert that every slot and block is free, or held by exactly one sequence that runs, was preempted or is in
        flight, and that blocks are charged to their holder's tenant.
        """
        holders = {*self.running.values(), *self.freeing.values(), *in_flight}
        self.pool.check_integrity()
        self.allowances.check_integrity()
        owned = [block for s in holders for block in s.block_table]
        assert len(owned) == len(set(owned)), "two sequences own one block"
        assert len(owned) + self.pool.num_free == self._config.num_blocks, "blocks were lost"
        held = Counter(s.tenant for s in holders for _ in s.block_table)
        assert held == self.allowances.held, "a tenant is not charged for what it holds"
        leaving = {s for s in holders if s.slot >= 0 and s.status is not _RUNNING}
        assert leaving == self._leaving, "what has left is not looked for"
        slots = [s.slot for s in holders if s.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(self._config.max_num_seqs)), "slots were lost"
