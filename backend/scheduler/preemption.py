"""Preemption chooses the victims where a running or waiting sequence needs memory or a slot.

A preempted sequence keeps its place and its tokens. Its computed blocks stay in the prefix cache until evicted;
evicted blocks are copied back from the host (`swapping`) or recomputed (Kwon et al., 2023).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from backend.config import EngineConfig
from backend.scheduler.batch import Counters
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence, SequenceStatus
from backend.scheduler.tenant_limits import YOUNGEST


class Victims:
    """Ranks victims among running sequences: lowest class first, within a class latest due first."""

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks) -> None:
        self._hooks = hooks
        self._max_preemptions = config.max_preemptions
        self._step_tokens = config.max_num_batched_tokens

    def key(self, sequence: Sequence) -> tuple[int, float]:
        """Return the rank of a sequence; the largest is the first victim."""
        return sequence.request.priority_class, self._hooks.due(sequence)

    def choose(self, running: Iterable[Sequence], step: int | None) -> list[Sequence]:
        """Return the eligible victims, first choice first.

        Sequences in `step` are not eligible, because their rows are planned already; nor are sequences at the limit of
        preemptions, or without progress since their last: two sequences could take each other's memory for ever.
        """
        return sorted((s for s in running if s.last_step != step and self._is_eligible(s)), key=self.key, reverse=True)

    def choose_for_share(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the eligible victims for the share of another tenant, first choice first.

        A victim has decoded, since its admission, for at least as many steps as its recompute takes. So sequences
        recompute no longer than they generate, however often tenants preempt each other.
        """
        return self.choose((s for s in running if self._steps(s) * self._step_tokens >= s.num_computed_tokens), None)

    def _steps(self, sequence: Sequence) -> int:
        """Return the decode steps of a running sequence since its admission."""
        return len(sequence.output) - sequence.num_kept_tokens

    def may_be_preempted(self, sequence: Sequence) -> bool:
        return sequence.is_spare or sequence.num_preemptions < self._max_preemptions

    def _is_eligible(self, sequence: Sequence) -> bool:
        progressed = sequence.num_preemptions == 0 or sequence.is_spare or self._steps(sequence) > 0
        return progressed and self.may_be_preempted(sequence)


class Preemption:
    """Takes running sequences out of the batch and queues them again."""

    def __init__(self, config: EngineConfig, kv_manager: KVManager, hooks: SchedulerHooks, counters: Counters) -> None:
        self.preempted: list[Sequence] = []  # by the last plan, or by the last lost step: the scheduler empties it
        self.preemptor: Sequence | None = None  # victims gave way to it, and none of its own tenant since
        self._config = config
        self._kv_manager = kv_manager
        self._hooks = hooks
        self._victims = Victims(config, hooks)
        self._counters = counters
        self._slots_of = Counter[str]()  # by tenant
        self._fullest_less_one = 0.0  # the most slots per weight that any tenant has without one of its own
        self._lowest_class = 0  # of the running sequences
        self._counted = -1, 0  # `running_changes` at the last count of slots

    def weights_changed(self) -> None:
        """Count the slots of each tenant anew, by the tenants' present weights."""
        self._counted = -1, 0

    def preempt_for_running(self, sequence: Sequence, needed: int, step: int) -> None:
        """Preempt sequences of lower rank until `needed` blocks are available or being freed.

        The sequence of the highest rank is never a victim, so it always progresses, and so does the engine.
        """
        own, key = self._victims.key(sequence), self._victims.key
        running = self._kv_manager.running.values()
        self._preempt_for(needed, [s for s in self._victims.choose(running, step) if key(s) > own])

    def not_giving_way_to(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that `sequence` cannot preempt.

        Only their remaining need is reserved at its admission: a lower class gives its memory to a higher one.
        """
        own, may_be_preempted = sequence.request.priority_class, self._victims.may_be_preempted
        running = self._kv_manager.running.values()
        return [s for s in running if s.request.priority_class <= own or not may_be_preempted(s)]

    def preempt_for_head(self, sequence: Sequence, num_held: int, scheduled: ScheduledStep) -> None:
        """Free a slot or memory for the head of the queue, which joins a later step.

        `num_held` of its blocks are held already, to be shared.

        The first victim is a sequence paused at a limit of another tenant, because it computes nothing meanwhile; else
        sequences of a lower class. The head is then admitted next, regardless of the queue's order: otherwise a victim,
        which keeps its place in the queue, would take back the freed memory.
        """
        before = len(self.preempted)
        self._preempt_for_head(sequence, num_held, scheduled)
        gave_way = self.preempted[before:]
        of_its_tenant = any(s.tenant == sequence.tenant for s in gave_way)
        self.preemptor = sequence if gave_way and not of_its_tenant else None

    def slots_are_kept_from(self, head: Sequence) -> bool:
        """Return True if, all slots being taken, the head can take none, but a sequence of another tenant might. O(1),
        except for the first call after a change of the running sequences.
        """
        return not self.may_take_a_slot(head.tenant, head.request.priority_class) and self._fullest_less_one > 0.0

    def may_take_a_slot(self, tenant: str, priority_class: int) -> bool:
        """Return False if no running sequence gives its slot to one of this tenant and class; `slot_for` decides where
        it may. Without weights classes alone do.
        """
        slots, weight = self._slots(), self._hooks.weight(tenant)
        if priority_class < self._lowest_class or weight is None:
            return True
        return (slots[tenant] + 1) / weight <= self._fullest_less_one

    @property
    def running_changes(self) -> tuple[int, int]:
        """A key that differs after every change of the running sequences."""
        return self._counters.admissions, len(self._kv_manager.running)

    def _slots(self) -> Counter[str]:
        """Return the slots of each tenant, recounted after a change of the running sequences."""
        if self._counted != self.running_changes:
            self._counted = self.running_changes
            running = self._kv_manager.running.values()
            self._slots_of = Counter([s.tenant for s in running if not s.is_spare])
            self._lowest_class = max([s.request.priority_class for s in running], default=0)
            less_one = [(count - 1) / (self._hooks.weight(tenant) or 1.0) for tenant, count in self._slots_of.items()]
            self._fullest_less_one = max(less_one, default=0.0)
        return self._slots_of

    def _preempt_for_head(self, sequence: Sequence, num_held: int, scheduled: ScheduledStep) -> None:
        if sequence.is_spare:
            return
        for victim, limit in scheduled.paused.items():
            if (
                limit is not WaitReason.PEERS
                and victim.tenant != sequence.tenant
                and victim.status is SequenceStatus.RUNNING
            ):
                self._yield(victim)
                return
        running, own = self._kv_manager.running, sequence.request.priority_class
        below = (s for s in running.values() if s.request.priority_class > own and not _goes_before(s, sequence))
        lower = self._victims.choose(below, None)
        if not self._kv_manager.free_slots:
            if (seated := self.slot_for(sequence)) is None:
                return  # memory is of no use without a slot
            self._preempt(seated)
            self._counters.slot_preemptions += not seated.is_spare
            lower = [one for one in lower if one is not seated]
        watermark = self._kv_manager.blocks.watermark_blocks(sequence, running.values())
        adapter = self._kv_manager.blocks.adapters.num_needed(sequence)
        needed = self._config.kv_blocks(sequence.num_tokens, sequence.request.model) - num_held + watermark + adapter
        if self._num_coming() < needed:
            self._preempt_for(needed, [*lower, *self._of_fuller_tenants(sequence, needed, lower)])

    def slot_for(self, head: Sequence) -> Sequence | None:
        """Return the running sequence that gives its slot to `head`: of a lower class, else of the fullest tenant that
        is owed no more than the head's, and for which

            (its slots - 1) / its weight >= (slots of the head's tenant + 1) / weight of the head's tenant.

        This is the rule; `may_take_a_slot` and `_fuller_tenants` only leave out what cannot meet it.
        """
        running, own = self._kv_manager.running, head.request.priority_class
        slots, own_weight = self._slots(), self._hooks.weight(head.tenant)
        if own < self._lowest_class:
            lower = [s for s in running.values() if s.request.priority_class > own and not _goes_before(s, head)]
            if victims := self._victims.choose(lower, None):
                return victims[0]
        if own_weight is None or (least := (slots[head.tenant] + 1) / own_weight) > self._fullest_less_one:
            return None
        for tenant, weight in self._fuller_tenants(head, slots, least):
            of_tenant = self._kv_manager.running_of(tenant)
            if (slots[tenant] - 1) / weight >= least and (victims := self._victims.choose_for_share(of_tenant)):
                return victims[0]
        return None

    def _fuller_tenants(self, head: Sequence, held: Mapping[str, int], least: float) -> list[tuple[str, float]]:
        """Return the tenants, with their weights, that hold more than `least` per weight and are owed no more than the
        head's tenant, the fullest first. `held` counts the slots or the blocks of each tenant.

        None gives anything to a request without a deadline of a tenant that is served: it waits for its turn by the
        order, which pays what it is owed, and no victim is recomputed for it.
        """
        is_served = self._slots()[head.tenant] > 0
        if is_served and not head.is_pressing:
            return []
        weights = {tenant: self._hooks.weight(tenant) or 1.0 for tenant in held if tenant != head.tenant}
        may_take = self._hooks.may_take
        fuller = [(t, w) for t, w in weights.items() if held[t] / w > least and may_take(head.tenant, t)]
        return sorted(fuller, key=lambda one: held[one[0]] / one[1], reverse=True)

    def _of_fuller_tenants(self, head: Sequence, needed: int, besides: list[Sequence]) -> list[Sequence]:
        """Return victims of tenants with more blocks per weight than the head's tenant would have with `needed` more,
        the fullest first. No tenant is taken below that level.
        """
        held, own_weight = self._kv_manager.allowances.held, self._hooks.weight(head.tenant)
        if own_weight is None:
            return []
        least = (held[head.tenant] + needed) / own_weight
        found = list[Sequence]()
        for tenant, weight in self._fuller_tenants(head, held, least):
            left, running = held[tenant], self._kv_manager.running_of(tenant)
            for victim in self._victims.choose_for_share([s for s in running if s not in besides]):
                left -= self._kv_manager.blocks.num_reclaimable(victim)
                if left / weight < least:
                    break
                found.append(victim)
        return found

    def yield_to_oldest(self, scheduled: ScheduledStep) -> bool:
        """Preempt the youngest sequence of each tenant with all its sequences paused for blocks; True if any was.

        The oldest, with the memory of the others, can always run to its end (`TenantLimits`). Tenants come in the
        order of their pauses: the order of a set would differ in a replay by another process.
        """
        tenants = dict.fromkeys(s.tenant for s, limit in scheduled.paused.items() if limit is WaitReason.ALLOWANCE)
        yielded = False
        for tenant in tenants:
            own = self._kv_manager.running_of(tenant)
            if len(own) > 1 and not any(self._kv_manager.is_in_flight(s) or s in scheduled.sequences for s in own):
                self._yield(max(own, key=YOUNGEST))
                yielded = True
        return yielded

    def break_deadlock(self, scheduled: ScheduledStep) -> Sequence | None:
        """Preempt one sequence, because every runnable sequence waits for memory that only another could free.

        The victim is a paused sequence, else the last in rank. Return the latter instead at its limit of preemptions:
        the caller ends it.
        """
        if scheduled.paused:
            none_yielded = all(s.status is SequenceStatus.RUNNING for s in scheduled.paused)
            if none_yielded:  # else one was preempted already, for the head
                self._yield(max(scheduled.paused, key=YOUNGEST))
            return None
        victim = max(self._kv_manager.running.values(), key=self._victims.key)
        if victim.num_preemptions >= self._config.max_preemptions:
            return victim
        victim.num_preemptions += victim.is_spare
        self._preempt_for_memory(victim)
        return None

    def take_back(self, sequence: Sequence) -> bool:
        """Preempt the spare class of the sequence's tenant, which holds what the sequence needs; True if any was."""
        own = [] if sequence.is_spare else self._kv_manager.running_of(sequence.tenant)
        spare = [s for s in own if s.is_spare]
        for victim in spare:
            self._yield(victim)
        return bool(spare)

    def num_kept_from(self, sequence: Sequence) -> int:
        """Return the free blocks that a sequence leaves to others: of the spare class, a place for each that runs."""
        if not sequence.is_spare:
            return 0
        others = [one for one in self._kv_manager.running.values() if not one.is_spare]
        return self._kv_manager.blocks.one_place_each(others)

    def shrink_batch(self, most: int) -> None:
        """Preempt the last in rank until `most` sequences run, the limit of smaller steps."""
        lowest = sorted(self._kv_manager.running.values(), key=self._victims.key, reverse=True)
        for victim in lowest[: max(0, len(lowest) - most)]:
            self._counters.rollback_preemptions += 1
            self._preempt_uncounted(victim)

    def _preempt_for(self, needed: int, candidates: list[Sequence]) -> None:
        """Preempt candidates in order until `needed` blocks are available or being freed; none if all are too few."""
        kv_manager, coming = self._kv_manager, self._num_coming()
        if coming + sum(map(kv_manager.blocks.num_reclaimable, candidates)) < needed:
            return
        for victim in candidates:
            if coming >= needed:
                return
            coming += kv_manager.blocks.num_reclaimable(victim)
            self._preempt_for_memory(victim)

    def _num_coming(self) -> int:
        """Return the blocks available or being freed."""
        kv_manager = self._kv_manager
        return kv_manager.blocks.num_available + sum(
            map(kv_manager.blocks.num_reclaimable, kv_manager.freeing.values())
        )

    def _preempt_for_memory(self, sequence: Sequence) -> None:
        sequence.watermark *= 1 if sequence.is_spare else 2
        self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence for another, which counts towards its limit of preemptions: the spare class has none."""
        if sequence.is_spare:
            self._yield(sequence)
            return
        self._counters.preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_kept_tokens = len(sequence.output)
        self._take_out(sequence)

    def _yield(self, sequence: Sequence) -> None:
        """Preempt a sequence at a limit of its own tenant, or of the spare class."""
        self._counters.yields += 1
        self._preempt_uncounted(sequence)

    def _preempt_uncounted(self, sequence: Sequence) -> None:
        """Preempt a sequence without counting towards its limit of preemptions."""
        sequence.num_yields += 1
        self._take_out(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        self.preempted.append(sequence)
        if self.preemptor and self.preemptor.tenant == sequence.tenant:
            self.preemptor = None
        self._kv_manager.preempt(sequence)


def _goes_before(running: Sequence, head: Sequence) -> bool:
    """Return True if `running` was preempted and resumed ahead of `head`, of the same tenant."""
    same_tenant = running.tenant == head.tenant and not running.is_spare
    return same_tenant and running.num_preemptions > 0 and running.admission_number > head.admission_number
