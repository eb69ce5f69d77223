"""Who gives way, when a sequence that runs or waits needs the memory or the slot of another.

By recompute (Kwon et al., 2023): whoever is preempted keeps its place and its tokens, and computes them again.
"""

from collections.abc import Iterable

from backend.config import EngineConfig
from backend.scheduler.batch import Counters
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.kv_manager import ResidentSet
from backend.scheduler.scheduled_step import Blocked, ScheduledStep
from backend.scheduler.sequence import Sequence, Status
from backend.scheduler.tenant_limits import YOUNGEST


class Victims:
    """Ranks running sequences: the lowest class gives way first, within a class as the policy says."""

    def __init__(self, policy: SchedulerHooks, max_preemptions: int) -> None:
        self._policy = policy
        self._most = max_preemptions

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """The largest gives way first."""
        return (sequence.priority_class, *self._policy.victim_rank(sequence))

    def of(self, running: Iterable[Sequence], step: int | None) -> list[Sequence]:
        """Who may be preempted, first choice first: not in `step`, not too often, not before making progress."""
        return sorted((s for s in running if s.last_step != step and self._may_go(s)), key=self.key, reverse=True)

    def may_be_preempted(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions < self._most

    def _may_go(self, sequence: Sequence) -> bool:
        progressed = sequence.num_preemptions == 0 or len(sequence.output) > sequence.num_kept_tokens
        return progressed and self.may_be_preempted(sequence)


class Preemption:
    """Takes residents out of the batch, and lets them wait again."""

    def __init__(
        self, config: EngineConfig, residents: ResidentSet, policy: SchedulerHooks, counters: Counters
    ) -> None:
        self.preempted: list[Sequence] = []  # since `begin`
        self.favoured: Sequence | None = None  # others gave way to it; none of its tenant's since, who may go before it
        self._config = config
        self._residents = residents
        self._holdings = residents.kv_manager
        self._victims = Victims(policy, config.max_preemptions)
        self._counters = counters

    def begin(self) -> None:
        """Another event: nobody was preempted by it yet."""
        self.preempted = []

    def make_room(self, sequence: Sequence, needed: int, step: int) -> None:
        """Preempt sequences that rank below this one until `needed` blocks are free or on their way back."""
        own, key = self._victims.key(sequence), self._victims.key
        running = self._residents.running.values()
        self._preempt_for(needed, [s for s in self._victims.of(running, step) if key(s) > own])

    def staying(self, sequence: Sequence) -> list[Sequence]:
        """Those running that would not give way to it, should memory run out: what others may still need is theirs
        only while nobody of a higher class wants it.
        """
        own, may_go = sequence.priority_class, self._victims.may_be_preempted
        return [s for s in self._residents.running.values() if s.priority_class <= own or not may_go(s)]

    def displace(self, sequence: Sequence, scheduled: ScheduledStep) -> None:
        """A head that found no slot or no memory takes those of others, after this step: of sequences that are paused
        at a limit of another tenant, then of a lower class. It is favoured then over whatever the queue has first.
        """
        before = len(self.preempted)
        self._displace(sequence, scheduled)
        gave_way = self.preempted[before:]
        alike = any(s.tenant == sequence.tenant for s in gave_way)
        self.favoured = sequence if gave_way and not alike else None

    def _displace(self, sequence: Sequence, scheduled: ScheduledStep) -> None:
        for victim in scheduled.paused:
            if victim.tenant != sequence.tenant and victim.status is Status.RUNNING:
                self._give_way(victim)
                return
        running, own = self._residents.running, sequence.priority_class
        below = (s for s in running.values() if s.priority_class > own and not _had_its_turn(s, sequence))
        lower = self._victims.of(below, None)
        if lower and not self._holdings.has_free_slot:
            self._preempt(lower.pop(0))
        room = self._holdings.room_to_grow(sequence, running.values())
        self._preempt_for(self._config.blocks_for(sequence.num_tokens) + room, lower)

    def yield_for_the_oldest(self, scheduled: ScheduledStep) -> bool:
        """Where all of a tenant's sequences are paused for blocks, the youngest gives up its own. Whether any did.

        Tenants come in the order in which they were paused: that of a set would differ in a replay by another process.
        """
        tenants = dict.fromkeys(s.tenant for s, limit in scheduled.paused.items() if limit is Blocked.ALLOWANCE)
        yielded = False
        for tenant in tenants:
            own = self._residents.of(tenant)
            if len(own) > 1 and not any(s.in_flight or s in scheduled.sequences for s in own):
                self._give_way(max(own, key=YOUNGEST))
                yielded = True
        return yielded

    def break_deadlock(self, scheduled: ScheduledStep) -> Sequence | None:
        """Everyone who could run waits for memory that only another could give. Whoever is paused gives way; else the
        last choice does. Returns it when it has been preempted as often as it may, and has to end.
        """
        if scheduled.paused:
            if all(s.status is Status.RUNNING for s in scheduled.paused):  # else one gave way already, to the head
                self._give_way(max(scheduled.paused, key=YOUNGEST))
            return None
        victim = max(self._residents.running.values(), key=self._victims.key)
        if not self._victims.may_be_preempted(victim):
            return victim
        self._preempt_for_memory(victim)
        return None

    def shed(self, most: int) -> None:
        """Steps have room for so many sequences only: the last choices are put back."""
        lowest = sorted(self._residents.running.values(), key=self._victims.key, reverse=True)
        for victim in lowest[: max(0, len(lowest) - most)]:
            self._counters.shed += 1
            self._put_back(victim)

    def _preempt_for(self, needed: int, candidates: list[Sequence]) -> None:
        coming = self._holdings.pool.num_free + sum(len(s.block_table) for s in self._residents.leaving.values())
        if coming + sum(len(s.block_table) for s in candidates) < needed:
            return
        for victim in candidates:
            if coming >= needed:
                return
            coming += len(victim.block_table)
            self._preempt_for_memory(victim)

    def _preempt_for_memory(self, sequence: Sequence) -> None:
        sequence.headroom *= 2
        self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """For others, which may happen to it a bounded number of times."""
        self._counters.preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_kept_tokens = len(sequence.output)
        self._suspend(sequence)

    def _give_way(self, sequence: Sequence) -> None:
        """At a limit of its own tenant."""
        self._counters.yields += 1
        self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        """For what does not count towards the most that it may be preempted."""
        sequence.num_yields += 1
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        self.preempted.append(sequence)
        if self.favoured and self.favoured.tenant == sequence.tenant:
            self.favoured = None
        self._residents.suspend(sequence)


def _had_its_turn(resident: Sequence, head: Sequence) -> bool:
    """Whether it gave way and came back before its tenant's own work that waits, by that tenant's order."""
    return resident.tenant == head.tenant and resident.num_preemptions > 0 and resident.turn > head.turn
