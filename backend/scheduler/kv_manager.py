"""The KV manager takes sequences through the batch: into a slot, and out of it once the device is done with them.

A slot is a sequence's row of device state, a block is `block_size` tokens of KV memory.
"""

from collections.abc import Iterable

from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockName
from backend.scheduler.allowances import HeldTenants
from backend.scheduler.batch import Counters
from backend.scheduler.block_tables import BlockTables
from backend.scheduler.drafting import PromptLookup
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.scheduled_step import Fork, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.scheduler.waiting_queue import WaitingQueue

_RUNNING, _PREEMPTED, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED
"""In Python 3.11 looking a member up in an enum takes as long as three calls; steps ask for each of their rows."""


class KVManager:
    """Gives sequences their slots, and frees slots and blocks. It decides nothing: the scheduler is its only caller.

    Blocks and slot of a sequence that ends or is preempted are freed when the last step in flight that names it
    completes, never earlier: until then the device may still write to them.
    """

    def __init__(
        self,
        config: EngineConfig,
        hooks: SchedulerHooks,
        waiting: WaitingQueue,
        held_tenants: HeldTenants,
        counters: Counters,
    ) -> None:
        self.blocks = BlockTables(config, hooks, counters)
        self.pool, self.cache, self.allowances = self.blocks.pool, self.blocks.cache, self.blocks.allowances
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.num_spare = 0  # running sequences of the spare class
        self.freeing: dict[str, Sequence] = {}  # preempted sequences that leave
        self._config = config
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.texts: dict[int, PromptLookup] = {}  # by slot, as far as `Drafting` has read them
        self._leaving: dict[Sequence, bool] = {}
        """Ended or preempted sequences that steps in flight name; True if all blocks were published at the end."""
        self._waiting = waiting
        self._held_tenants = held_tenants
        self.counters = counters

    @property
    def num_held(self) -> int:
        pool = self.blocks.pool
        return pool.num_blocks - pool.num_free - self.blocks.cache.num_idle

    @property
    def num_available_to_others(self) -> int:
        """The blocks available to sequences that are not of the spare class, which gives up its own."""
        spare = [s for s in self.running.values() if s.is_spare] if self.num_spare else []
        return self.blocks.num_available + sum(map(self.blocks.num_reclaimable, spare))

    def begin_event(self, now: float) -> None:
        """Begin an event at `now`: holdings were constant since the last one."""
        self.blocks.holdings.now = self.cache.kept.now = now
        if self.blocks.newly_named:
            self.blocks.newly_named.clear()

    def limit_cache(self, tenant: str, floor: int, ceiling: int | None, now: float = 0.0) -> None:
        """Keep at least `floor` and at most `ceiling` idle blocks of the tenant; the floor is not evictable. None: no
        ceiling.
        """
        self.begin_event(now)
        self.cache.limit(tenant, floor, ceiling)
        self.blocks.swapping.limit(tenant, floor)

    def pin_prefixes(self, tenant: str, names: Iterable[BlockName], now: float = 0.0) -> None:
        """Pin idle blocks of the first model with these names for the tenant and unpin its others; a block's name comes
        behind the name of its predecessor.
        """
        self.begin_event(now)
        if self._config.window_groups:
            names = self.blocks.windows.with_windows(names, self._config.window_groups)
        self.blocks.pinned_prefixes.pin(tenant, names)
        self._held_tenants.resume(tenant)

    def running_of(self, tenant: str) -> list[Sequence]:
        """Return the tenant's running sequences, in the order of their admission."""
        return [sequence for sequence in self.running.values() if sequence.tenant == tenant]

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return True if a step in flight names the sequence."""
        return sequence.last_step > self.cache.completed_step

    def admit(self, sequence: Sequence) -> None:
        """Let the sequence run from now on, in a slot of its own and without blocks yet."""
        sequence.slot = self.free_slots.pop()
        sequence.status = _RUNNING
        sequence.num_admitted_tokens = sequence.num_tokens
        sequence.jumps = False
        self.running[sequence.id] = sequence
        self.num_spare += sequence.is_spare
        self.counters.admissions += 1
        sequence.admission_number = self.counters.admissions

    def preempt(self, sequence: Sequence) -> None:
        """Take the sequence out of the batch; it waits again once its memory is free."""
        sequence.status = _PREEMPTED
        del self.running[sequence.id]
        self.num_spare -= sequence.is_spare
        self.freeing[sequence.id] = sequence
        self._free_if_idle(sequence)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End the sequence, running or not."""
        self.blocks.between_turns.settled(sequence)
        if self.running.pop(sequence.id, None) is not None:
            self.num_spare -= sequence.is_spare
        self.freeing.pop(sequence.id, None)
        sequence.status = _FINISHED
        sequence.finish_reason = reason
        if reason is FinishReason.FAILED:
            self.blocks.distrust(sequence)
        self._free_if_idle(sequence)

    def release_windows(self, scheduled: ScheduledStep) -> None:
        """Free what the rows of a completed step were the last to see in layers with a window."""
        batch, windows, size = scheduled.batch, self.blocks.windows, self.blocks.block_size
        if not self._config.windows_of(batch.model)[0]:
            return
        for sequence, start, length in zip(scheduled.sequences, batch.starts, batch.lengths, strict=True):
            filled = min(start + length, sequence.num_computed_tokens) // size  # without drafts that were not accepted
            is_filled = filled > start // size and sequence.status is _RUNNING
            if (
                is_filled
                and windows.computed(sequence, filled * size)
                and sequence.tenant in self._held_tenants.reasons
            ):
                self._held_tenants.resume(sequence.tenant)
        self.blocks.pinned_prefixes.unpin_excess()

    def free_idle(self, sequences: Iterable[Sequence]) -> None:
        """Free these sequences' memory where it may be freed, now that a step which named them is no longer in
        flight.
        """
        if self._leaving:
            for sequence in sequences:
                if sequence.status is not _RUNNING:
                    self._free_if_idle(sequence)

    def undo_from(self, step: int, forks: Iterable[Fork]) -> None:
        """Undo the effects of this lost step, and of all later ones, on blocks."""
        self.blocks.undo_from(step, forks, [*self.running.values(), *self._leaving])

    def _free_if_idle(self, sequence: Sequence) -> None:
        """Free blocks and slot, unless a step in flight still names the sequence; a preempted one waits again."""
        if sequence.slot < 0:
            return
        if self.is_in_flight(sequence):
            if not self._leaving.get(sequence):  # the next turn may arrive before the step in flight completes
                self._leaving[sequence] = sequence.status is _FINISHED and self.blocks.publish_all(sequence)
            return
        is_published = self._leaving.pop(sequence, False)
        self.blocks.free(sequence, is_published=is_published)
        self.free_slots.append(sequence.slot)
        self.texts.pop(sequence.slot, None)
        sequence.slot = -1
        self._held_tenants.resume(sequence.tenant)
        if sequence.status is _PREEMPTED:
            sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
            del self.freeing[sequence.id]
            self._waiting.restore(sequence)

    def check_slots(self, in_flight: Iterable[Sequence]) -> None:
        """Assert that every slot is free or held by exactly one running, preempted or in-flight sequence, and the
        integrity of their blocks.
        """
        holders = {*self.running.values(), *self.freeing.values(), *in_flight}
        self.blocks.check_blocks(holders)
        leaving = {s for s in holders if s.slot >= 0 and s.status is not _RUNNING}
        assert leaving == self._leaving.keys(), "what has left is not looked for"
        slots = [s.slot for s in holders if s.slot >= 0]
        assert sorted(slots + self.free_slots) == list(range(self._config.max_num_seqs)), "slots were lost"
