"""The scheduler decides which tokens a step computes: continuous batching, chunked prefill, paged KV memory.

Iteration-level scheduling is Orca's (Yu et al., 2022), paged memory with preemption by recompute vLLM's (Kwon et al.,
2023), prefill in chunks beside the decodes Sarathi-Serve's (Agrawal et al., 2024).
"""

from collections import deque

from backend.config import EngineConfig
from backend.scheduler.accounting import Accounting
from backend.scheduler.allowances import HeldTenants
from backend.scheduler.batch import Batch, Counters, StepOutput
from backend.scheduler.batching import RULES, StepParts
from backend.scheduler.block_tables import BlockNaming
from backend.scheduler.drafting import Drafting
from backend.scheduler.forking import Forking
from backend.scheduler.hooks import DefaultHooks, SchedulerHooks
from backend.scheduler.joining import Joining
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.lost_steps import DeviceResync, TokenBudget
from backend.scheduler.preemption import Preemption
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import (
    NewToken,
    PrefillBudget,
    ScheduledStep,
    SpareStep,
    WaitReason,
)
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.scheduler.step_rows import StepRows
from backend.scheduler.tenant_limits import TenantLimits
from backend.scheduler.turns import Turns
from backend.scheduler.waiting_queue import WaitingQueue

_RUNNING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED  # see `kv_manager`: looking them up takes time
_PASSED_OVER = (WaitReason.TOKENS, WaitReason.ALLOWANCE, WaitReason.MODEL, WaitReason.ADAPTER)
_LACKS = (WaitReason.SLOTS, WaitReason.MEMORY)


class Scheduler:
    """Plans steps and accounts for them. Pure: no clock, no I/O, no tensors; one owner calls it.

    `now` is the time in seconds on the owner's clock, from which block-seconds are counted; an owner that does not bill
    for memory leaves it out. Up to `steps_in_flight` planned steps may be incomplete.

    A sequence at a limit of its tenant pauses: it keeps its place and its memory, and computes nothing. When all of a
    tenant's sequences are paused for blocks, the youngest is preempted for the others.

    After a step for which the device had no memory, steps are smaller for a while: the prefill of the lowest classes is
    left out first, and then their sequences.
    """

    def __init__(self, config: EngineConfig, waiting: WaitingQueue, hooks: SchedulerHooks | None = None) -> None:
        self.config = config
        self.waiting = waiting
        self.hooks = hooks or DefaultHooks(config)
        self.counters = Counters()
        self.in_flight: deque[ScheduledStep] = deque()  # oldest first
        self.wait_reason: WaitReason | None = None  # of the head of the queue in the last plan
        self.waiting_head: Sequence | None = None  # the head that `wait_reason` is about
        self.overtaker: Sequence | None = None  # takes a slot that sequences due before it may not take
        self._held_tenants = HeldTenants(waiting)
        self.held_tenants = self._held_tenants.reasons  # tenants with admission on hold, and the limit met
        self.kv_manager = KVManager(config, self.hooks, waiting, self._held_tenants, self.counters)
        self.running: dict[str, Sequence] = self.kv_manager.running  # in the order of admission
        self.limits = TenantLimits(config, self.kv_manager, self.hooks)
        self._preemption = Preemption(config, self.kv_manager, self.hooks, self.counters)
        self.preempted = self._preemption.preempted  # by the last plan, or by the last lost step
        self.ended: list[Sequence] = []  # by planning, until `take_ended`
        self._joining = Joining(config, self.kv_manager, self.limits, self._preemption, self.hooks)
        self.drafting = None if config.speculate == "off" else Drafting(config, self.hooks, self.kv_manager.texts)
        self._rows = StepRows(self.kv_manager, self._preemption, self.drafting)
        self._forking = Forking(config, self.kv_manager)
        self._accounting = Accounting(self.kv_manager, self.counters)
        self._next_step = 0
        self._none_takes_a_slot_at: tuple[tuple[int, int], int] | None = None  # changes until the last vain search
        self.budget = TokenBudget(config.max_num_batched_tokens)  # of a step, less after lost steps
        self._resync = DeviceResync()
        # of several models; None: all sequences are of the first
        self._turns = Turns(config, self.hooks.weight) if config.awake_bytes else None
        self._spare: SpareStep | None = None  # of the step being planned; None: it is not open to the spare class
        parts = StepParts(
            config,
            self.kv_manager,
            waiting,
            self.in_flight,
            self._rows,
            self.budget,
            self.counters,
            self._plan_decodes,
            self._plan_prefills,
        )
        self._rule = RULES[config.batching](parts)

    # arrivals and departures

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queue a sequence. Its prompt and max_tokens must fit max_model_len. The cached blocks of its conversation's
        last turn are evicted last, until it has a slot or has ended.
        """
        assert 0 < sequence.num_prompt_tokens < sequence.request.most_tokens <= self.config.max_model_len
        if self._turns is None and sequence.request.model:
            self._turns = Turns(self.config, self.hooks.weight)
        sequence.block_table.num_told_names = len(sequence.block_names)
        sequence.admission_number = self.counters.admissions
        self.kv_manager.blocks.between_turns.claim(sequence, now)
        self.waiting.add(sequence)
        self._rule.arrived(sequence)
        self._held_tenants.resume(sequence.tenant)

    def look_up(self, sequence: Sequence, now: float = 0.0) -> None:
        """Count the cached prompt tokens of a newcomer (`num_found_tokens`), by which its first token is forecast.
        Nothing keeps them: the newcomer may be refused.
        """
        self.kv_manager.begin_event(now)
        sequence.num_found_tokens = self.num_cached_tokens(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the prefix tokens of a waiting sequence that are cached or computed by steps in flight."""
        return len(self.kv_manager.blocks.find(sequence, self._next_step).blocks) * self.config.block_size

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, now: float = 0.0) -> None:
        """Finish (abort) a sequence in any state: it yields no further token, and its blocks are freed. Idempotent."""
        self.kv_manager.begin_event(now)
        if sequence.status is _FINISHED:
            return
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self._rule.left(sequence)
            self._held_tenants.resume(sequence.tenant)
        self.kv_manager.finish_sequence(sequence, reason)

    def allow(self, tenant: str, blocks: int | None, now: float = 0.0) -> None:
        """Set the tenant's allowance of blocks; None: no limit."""
        self.kv_manager.begin_event(now)
        self.kv_manager.blocks.allow(tenant, blocks)
        self._held_tenants.resume(tenant)

    def weights_changed(self) -> None:
        """Compare slots by the tenants' present weights from now on."""
        self._none_takes_a_slot_at = None
        self._preemption.weights_changed()

    def raise_token_limit(self, sequence: Sequence, tokens: int) -> None:
        """Raise the sequence's `token_limit` by `tokens`, at most to its max_tokens."""
        sequence.raise_limit(tokens)
        self._held_tenants.resume(sequence.tenant)

    def take_ended(self) -> list[Sequence]:
        """Return the sequences ended by planning since the last call, because no victim was left to free memory."""
        ended, self.ended = self.ended, []
        return ended

    def name_blocks_by(self, names: BlockNaming) -> None:
        """Have output blocks named; without it only prompt blocks have names."""
        self.kv_manager.blocks.names = names

    @property
    def runs_others(self) -> bool:
        """True while a sequence runs that is not of the spare class."""
        return len(self.running) > self.kv_manager.num_spare

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def is_full(self) -> bool:
        return len(self.in_flight) >= self.config.steps_in_flight

    @property
    def wakes_at(self) -> float | None:
        """The time to plan again even without an event: a gathered batch is due."""
        return self._rule.wakes_at

    def prefill_budget(
        self, num_decodes: int, decode_context: int, interval: float | None, model: int = 0
    ) -> PrefillBudget:
        """Return the prefill budget of a step of a model beside these decodes."""
        tokens = self.budget.tokens - num_decodes
        return self.hooks.prefill_budget(num_decodes, decode_context, interval, tokens, model)

    def wake_seconds(self, model: int) -> float:
        """Return the seconds until a model's weights are in memory, if it sleeps."""
        return 0.0 if self._turns is None else self._turns.wake_seconds(model)

    def takes_a_slot(self, sequence: Sequence) -> bool:
        """Return True if a running sequence would give its slot to this waiting one."""
        return self._preemption.slot_for(sequence) is not None

    # planning

    def schedule(self, now: float = 0.0) -> Batch | None:
        """Plan the next step; None when there is nothing to compute or enough steps are already in flight.

        An empty plan is retried after each remedy, in order: a tenant's youngest sequence yields to its oldest; a
        budget cut by lost steps is restored; with no step in flight to free memory, a victim is preempted, or ended at
        its limit of preemptions. Each remedy applies a bounded number of times.
        """
        if len(self.in_flight) >= self.config.steps_in_flight:
            return None
        self._begin_plan(now)
        num_held = len(self.held_tenants)
        while not (scheduled := self._plan_step(now)).sequences:
            assert not scheduled.admitted, "a sequence was admitted to a step that does not take place"
            self._resync.untold += scheduled.hits
            if scheduled.paused and self._preemption.yield_to_oldest(scheduled):
                continue
            if not self.in_flight and self.budget.restore():
                continue
            if self._is_waiting(scheduled):
                return None
            if self.kv_manager.num_spare and len(self.held_tenants) > num_held:
                num_held = len(self.held_tenants)  # the spare class left the step to their requests
                continue
            if (hopeless := self._preemption.break_deadlock(scheduled)) is not None:
                self.ended.append(hopeless)
                self.kv_manager.finish_sequence(hopeless, FinishReason.PREEMPTED)
        if scheduled.paused:
            self._preemption.yield_to_oldest(scheduled)
        self._next_step += 1
        self.in_flight.append(scheduled)
        self.kv_manager.blocks.plan_copies(scheduled.batch)
        if self._resync.out_of_sync:
            self._resync.add_to(scheduled)
        return scheduled.batch

    def _begin_plan(self, now: float) -> None:
        self.kv_manager.begin_event(now)
        self.wait_reason, self.waiting_head = None, None
        self.preempted.clear()
        if self.drafting is not None:
            drafts = self.in_flight[-1].drafts if self.in_flight else {}
            self.drafting.begin_plan([*self.running.values()], bool(self.waiting), self._next_step, drafts)

    def _is_waiting(self, scheduled: ScheduledStep) -> bool:
        """Return True if an empty plan may become one with rows without a victim: a step ends, or a limit is raised."""
        if self.in_flight or self.kv_manager.freeing:
            return True
        stuck = [s for s in self.running.values() if s not in scheduled.paused]
        return not stuck or (bool(scheduled.paused) and all(s.is_spare for s in stuck))

    def _plan_step(self, now: float) -> ScheduledStep:
        """Plan a step of the model whose turn it is; without a row of it, of the next that has one."""
        if self._turns is None:
            return self._plan_rows(now, 0)
        paused, tried = dict[Sequence, WaitReason](), set[int]()
        model = self._next_model(tried) or 0
        while True:
            scheduled = self._plan_rows(now, model)
            scheduled.paused |= paused
            if scheduled.sequences:
                scheduled.batch.asleep = self._turns.planned(model, scheduled.batch.step)
            self._release_passed_over()
            tried.add(model)
            if scheduled.sequences or (following := self._next_model(tried)) is None:
                return scheduled
            self._resync.untold += scheduled.hits
            paused, model = scheduled.paused, following

    def _next_model(self, tried: set[int]) -> int | None:
        """Return the model that may have a row: a plan may have held the queue's head, before another model's."""
        assert self._turns is not None
        return self._turns.next(self.running.values(), self.waiting.head(), tried)

    def _release_passed_over(self) -> None:
        """Let the queue offer again what waits for another model's step."""
        if self._joining.num_set_aside:
            self._joining.num_set_aside = self._joining.blocks_set_aside = 0
            self._held_tenants.resume_all(WaitReason.MODEL)

    def _plan_rows(self, now: float, model: int) -> ScheduledStep:
        scheduled = ScheduledStep(Batch(self._next_step, model=model), planned_at=now)
        if self._resync.untold:
            self._resync.tell_hits(scheduled)
        if (adapters := self.kv_manager.blocks.adapters).num_copied:  # or nobody was passed over
            adapters.num_copied = 0
            self._held_tenants.resume_all(WaitReason.ADAPTER)
        self._rule.plan(scheduled)
        return scheduled

    def _plan_decodes(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Add a row for every decode with memory; return the sequences that are still prefilling.

        `max_num_seqs` is at most `max_num_batched_tokens`, so all decodes fit each step and none has to rotate.
        """
        batch, step = scheduled.batch, scheduled.batch.step
        slots, starts, sequences = batch.slots, batch.starts, scheduled.sequences
        block_size, drafts = self.config.block_size, self.drafting is not None and self.drafting.may_take(batch.model)
        prefilling, jumping = list[Sequence](), list[Sequence]()
        for sequence in self._served(batch.model):
            start, num_tokens = sequence.num_computed_tokens, sequence.num_tokens
            if start < sequence.num_admitted_tokens:
                (jumping if sequence.jumps else prefilling).append(sequence)
                continue
            if num_tokens == start or num_tokens == sequence.token_limit:  # noqa: PLR1714 - for each row of each step
                if start < num_tokens < sequence.request.most_tokens:
                    scheduled.paused[sequence] = WaitReason.TOKENS
                continue  # its last token is in flight, or it is at its limit
            if sequence.status is not _RUNNING or (drafts and self._drafts(sequence, jumping)):
                continue  # preempted for an earlier sequence, or it has another row
            if start == len(sequence.block_table.blocks) * block_size:
                self.kv_manager.blocks.name_known(sequence)
                if not self._rows.grow(sequence, 1, scheduled):
                    continue
            slots.append(sequence.slot)
            starts.append(start)
            sequences.append(sequence)
            sequence.num_computed_tokens = start + 1
            sequence.num_tokens = num_tokens + 1
            sequence.last_step = step
        batch.num_decodes = rows = len(slots)
        batch.lengths = [1] * rows
        batch.sampled = list(range(rows))
        scheduled.sampled = sequences.copy()
        scheduled.decode_context = sum(starts) + rows
        if self._spare is not None:
            scheduled.count_spare()
        if jumping:
            self._rows.add_jumps(jumping, scheduled, self.budget.tokens)
        return prefilling

    def _drafts(self, sequence: Sequence, jumping: list[Sequence]) -> bool:
        """Return True if tokens are drafted behind the newest token of a decode: both have one row, planned once that
        token is known.
        """
        assert self.drafting is not None
        if not self.drafting.takes(sequence):
            return False
        if sequence.num_tokens == sequence.num_prompt_tokens + len(sequence.output):
            sequence.num_admitted_tokens, sequence.jumps = sequence.num_tokens, True
            jumping.append(sequence)
        return True

    def _served(self, model: int) -> list[Sequence]:
        """Return the running sequences that may have rows in this step of a model: of the spare class, as many decodes
        as there is time for, earliest due first, and all prefills if those are all of its decodes. Without others, one
        step of it is in flight.
        """
        self._spare, running = None, list(self.running.values())
        if self._turns is not None:
            running = [s for s in running if s.request.model == model]
        num_spare = self.kv_manager.num_spare
        if not num_spare:
            return running
        if num_spare == len(self.running) and self.in_flight and self.in_flight[-1].sequences[0].is_spare:
            return []  # or an arrival would wait for two steps
        others, head = [s for s in running if not s.is_spare], self.waiting.head()
        if not (head is None or head.is_spare) or any(s.is_prefilling and not s.jumps for s in others):
            return others
        spare, step = [s for s in running if s.is_spare], self._open_spare(others, model)
        if not step.num_decodes([1]) and not all(s.is_prefilling for s in spare):
            return others  # beside short steps not even the first token fits: ranking them is for nothing
        spare.sort(key=self.hooks.due)
        decodes = [s for s in spare if not s.is_prefilling]
        count = step.num_decodes([s.num_computed_tokens + 1 for s in decodes])
        if count < len(decodes):
            return [*others, *decodes[:count]]
        return [*others, *decodes, *(s for s in spare if s.is_prefilling)]

    def _open_spare(self, others: list[Sequence], model: int) -> SpareStep:
        """Open the step to the spare class, beside the decodes of others."""
        interval = min([each for s in others if (each := s.request.token_interval) is not None], default=None)
        context = sum([s.num_computed_tokens for s in others])
        self._spare = step = self.hooks.spare_step(len(others), context, interval, model)
        return step  # mypyc takes the attribute for None where it was set to that before

    def _plan_prefills(self, prefilling: list[Sequence], scheduled: ScheduledStep) -> None:
        """Plan prefill chunks, earliest due first, running or waiting.

        First come, first served would make all later requests wait for a prompt of many steps, and equal shares would
        make every prompt wait for every other. A prompt's due time is fixed as it begins, so none is passed over for
        ever. Decodes have no part in it: a decode takes one token of a step, a prefill all remaining ones.
        """
        if self.drafting is None:
            promised = [each for s in scheduled.sequences if (each := s.request.token_interval) is not None]
        else:
            promised = self.drafting.intervals(scheduled.sequences)
        interval = min(promised, default=None)
        batch, decodes = scheduled.batch, scheduled.batch.num_decodes
        jumps = range(decodes, len(batch.slots))
        context = scheduled.decode_context + sum([batch.starts[row] for row in jumps])
        room = self._rule.prefill_room(prefilling, self.budget.tokens - len(batch.slots))
        if not (prefilling or self._spare or self.kv_manager.num_spare):
            head = self.waiting.head()
            if head is not None and head.is_spare:
                self._open_spare(scheduled.sequences, batch.model)
        if self._spare is not None:
            spare, tokens = scheduled.spare_decodes, self.budget.tokens - len(batch.slots)
            budget = self._spare.prefill_budget(spare, scheduled.spare_context, tokens)
        elif room is None:
            budget = self.prefill_budget(len(batch.slots), context, interval, batch.model)
        else:
            budget = PrefillBudget(room)
        for row in jumps:
            budget.spend(batch.starts[row], batch.lengths[row] - 1)  # one of them counts as a decode
        self._joining.begin_plan()
        for sequence in sorted(prefilling, key=self.hooks.due):
            self._admit_waiting(scheduled, budget, sequence)
            if sequence.status is not _RUNNING or sequence.last_step == batch.step:
                continue  # preempted for an earlier sequence, and perhaps admitted again
            hit = self._forking.find(sequence, scheduled, budget)
            length = self._chunk(sequence, hit, budget)
            if self._take(sequence, hit, scheduled) and length:
                self._prefill(sequence, length, scheduled, budget)
        self._admit_waiting(scheduled, budget, None)

    def _chunk(self, sequence: Sequence, hit: PrefixHit, budget: PrefillBudget) -> int:
        """Return the number of tokens of a prefill that this step can compute beside the hit; 0 when it does not fit.

        Tokens that another sequence computes in this very step are not computed twice, but found in the next; nor are
        tokens that the host has, beyond a block that keeps the step from having no row.
        """
        if hit.is_being_computed:
            return 0
        found, most = hit.num_blocks * self.config.block_size, self.config.prefill_chunk
        start, uncomputed = sequence.num_computed_tokens + found, sequence.num_uncomputed_tokens - found
        if hit.is_cut:
            return budget.fits(start, self.config.block_size)
        if most is None:
            return uncomputed if budget.fits(start, uncomputed) == uncomputed else 0
        return budget.fits(start, min(uncomputed, most))

    def _prefill(self, sequence: Sequence, length: int, scheduled: ScheduledStep, budget: PrefillBudget) -> None:
        start = sequence.num_computed_tokens
        if self._rows.grow(sequence, length, scheduled):
            self._rows.add_prefill(sequence, length, scheduled)
            budget.spend(start, length)

    def _take(self, sequence: Sequence, hit: PrefixHit, scheduled: ScheduledStep) -> bool:
        """Append the hit to a running sequence's block table; False if it pauses at its tenant's allowance instead."""
        blocks, tenant = self.kv_manager.blocks, sequence.tenant
        if self._forking.takes(sequence, hit) and not blocks.permits(tenant, hit.num_held_blocks - hit.num_paid, hit):
            scheduled.paused[sequence] = WaitReason.ALLOWANCE
            return False
        self._forking.take_hit(sequence, hit, scheduled)
        return True

    def _admit_waiting(self, scheduled: ScheduledStep, budget: PrefillBudget, before: Sequence | None) -> None:
        """Admit heads of the queue, all or, with `before`, the heads due before that running sequence.

        A head that does not fit stops admission: if smaller requests overtook it, a large one would starve. It is
        overtaken only

        - at a limit of its own tenant, which must not delay other tenants (TOKENS, ALLOWANCE),
        - in a step of another model, where its slot and its blocks are set aside (MODEL),
        - in a step that brings as many adapters as it may (ADAPTER),
        - where all slots are taken, by a sequence that may take a slot from another tenant (`_head`).
        """
        due = self.hooks.due
        while (sequence := self._head(scheduled)) is not None:
            if before is not None and (self._joining.still_lacks(sequence) or due(sequence) >= due(before)):
                break
            if sequence.is_spare and self._spare is None:
                break
            hit = self._forking.find(sequence, scheduled, budget)
            length = self._chunk(sequence, hit, budget)
            self.wait_reason = self._joining.why_wait(sequence, hit, length, scheduled, self._rule)
            if self.wait_reason is WaitReason.ALLOWANCE and self._preemption.take_back(sequence):
                continue
            if self.wait_reason in _PASSED_OVER:
                self._held_tenants.hold(sequence.tenant, self.wait_reason)  # the next head is another tenant's
                self.wait_reason = None
                continue
            if self.wait_reason in _LACKS and not self._joining.num_set_aside:
                self._preemption.preempt_for_head(sequence, hit.num_held, scheduled)
            if self.wait_reason is not None:
                self.waiting_head = sequence
                self._joining.lacks(sequence)
                break
            self.waiting.remove(sequence)
            self._start(sequence, hit, scheduled)
            self._rule.left(sequence)
            if length:
                self._prefill(sequence, length, scheduled, budget)

    def _head(self, scheduled: ScheduledStep) -> Sequence | None:
        """Return the last preemptor, if it still waits; else the head of the queue or, where no slot is free, the first
        waiting sequence that may take one from a running sequence.
        """
        head, held = self._preemption.preemptor, self._held_tenants.reasons
        if head and head.status is SequenceStatus.WAITING and head.tenant not in held:
            return head
        head, self.overtaker = self.waiting.head(), None
        if head is None or head.is_spare or scheduled.paused or self.kv_manager.free_slots or self.kv_manager.freeing:
            return head
        if not self._preemption.slots_are_kept_from(head):
            return head
        changes = self._preemption.running_changes, self._held_tenants.num_changes
        if self._none_takes_a_slot_at == changes:
            return head
        self.overtaker = self.hooks.first_that(self._preemption.may_take_a_slot)
        if self.overtaker is None:
            self._none_takes_a_slot_at = changes
        return self.overtaker or head

    def _start(self, sequence: Sequence, hit: PrefixHit, scheduled: ScheduledStep) -> None:
        self.kv_manager.admit(sequence)
        if self.preempted:  # in this plan, perhaps from this slot
            scheduled.drop_hits(sequence.slot)
        self._forking.take_hit(sequence, hit, scheduled)
        if sequence.adapter_table is not None:  # behind the hit, whose blocks it might evict
            self.kv_manager.blocks.adapters.take(sequence, scheduled.batch.step)
        scheduled.add_admission(sequence)
        self.kv_manager.blocks.between_turns.settled(sequence)
        sequence.num_found_tokens = 0
        self.hooks.admitted(sequence, follows=hit.follows_leader)

    # lost steps

    def rollback(self, now: float = 0.0) -> bool:
        """Undo the oldest step in flight, for which the device had no memory, and all later ones.

        The next plan reuses its number, and at most as many sequences run as the cut budget has tokens. Return False
        when steps have been lost for too long.
        """
        self.kv_manager.begin_event(now)
        self.preempted.clear()
        self.counters.lost_steps += 1
        failed = self.in_flight[0]
        undone = [*reversed(self.in_flight)]
        self.in_flight.clear()
        for scheduled in undone:
            scheduled.undo()
        self.kv_manager.undo_from(failed.batch.step, [fork for scheduled in undone for fork in scheduled.forks])
        for scheduled in undone:
            self.kv_manager.free_idle(scheduled.named)
        self._next_step = failed.batch.step
        feasible = self.budget.halve(failed.num_tokens)
        self._preemption.shrink_batch(self.budget.tokens)
        self._resync.mark_out_of_sync(self.running.values())
        if self._turns is not None:
            self._turns.lost()
        return feasible

    # accounting

    def update_from_output(self, output: StepOutput, now: float = 0.0) -> list[NewToken]:
        """Account for the oldest step in flight; return its new tokens in row order."""
        self.kv_manager.begin_event(now)
        scheduled = self.in_flight.popleft()
        assert scheduled.batch.step == output.step
        self.kv_manager.blocks.completed(output.step)
        if self.budget.is_cut:
            self.budget.computed()
        self._rule.completed(output.elapsed)
        if self._turns is not None:
            self._turns.completed(scheduled.batch.model, output.step, output.elapsed)
        new_tokens = self._accounting.account(scheduled, output)
        if self.kv_manager.blocks.windows.num_groups:
            self.kv_manager.release_windows(scheduled)
        if self.drafting is not None and scheduled.drafts:
            self.drafting.completed(scheduled)
        return new_tokens

    def check_integrity(self) -> None:
        """Assert that every slot and block is free or has a holder that may use it."""
        self.kv_manager.check_slots(s for scheduled in self.in_flight for s in scheduled.named)
