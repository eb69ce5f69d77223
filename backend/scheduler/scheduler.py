"""Which tokens the next step computes: continuous batching with chunked prefill over paged KV memory.

Iteration-level scheduling is Orca's (Yu et al., 2022), paged memory with preemption by recompute vLLM's (Kwon et al.,
2023), prefill in chunks beside the decodes Sarathi-Serve's (Agrawal et al., 2024).
"""

from collections import deque
from operator import attrgetter

from backend.config import Batching, EngineConfig, KVAllocation
from backend.paged_kv.block_pool import BlockPool
from backend.scheduler.allowances import PassedOver
from backend.scheduler.batch import NO_TOKEN, Batch, Counters, StepOutput
from backend.scheduler.hooks import DefaultHooks, PrefillRoom, SchedulerHooks
from backend.scheduler.kv_manager import KVManager, ResidentSet
from backend.scheduler.preemption import Preemption
from backend.scheduler.scheduled_step import Blocked, Delta, Retelling, ScheduledStep, introduce
from backend.scheduler.sequence import FinishReason, Sequence, Status
from backend.scheduler.tenant_limits import TenantLimits
from backend.scheduler.token_budget import TokenBudget
from backend.scheduler.waiting_queue import WaitingQueue

_BY_CLASS = attrgetter("priority_class")


class Scheduler:
    """Plans steps and accounts for them. Pure: no clock, no I/O, no tensors; one owner calls it.

    `now` is the time in seconds of the owner's clock, from which the time that sequences hold memory is reckoned; an
    owner that does not bill for memory leaves it out.

    Up to `steps_in_flight` planned steps may be incomplete.

    A sequence that reaches a limit of its tenant pauses: it keeps its place and its memory, and computes nothing. When
    all of a tenant's sequences are paused for blocks, the youngest gives its own to the others.

    Where the device had no memory for a step, steps are smaller for a while. What they have no room for is the prefill
    of the lowest classes, and then their sequences.
    """

    def __init__(self, config: EngineConfig, waiting: WaitingQueue, policy: SchedulerHooks | None = None) -> None:
        self.config = config
        self.waiting = waiting
        self.policy = policy or DefaultHooks(config)
        self.counters = Counters()
        self.in_flight: deque[ScheduledStep] = deque()  # oldest first
        self.blocked: Blocked | None = None  # why the last plan left the head of the queue waiting
        self.blocked_head: Sequence | None = None  # which it was
        self._passed_over = PassedOver(waiting)
        self._residents = ResidentSet(config, waiting, self._passed_over, self.counters)
        self._limits = TenantLimits(config, self._residents, self.policy)
        self._preemption = Preemption(config, self._residents, self.policy, self.counters)
        self.kv_manager: KVManager = self._residents.kv_manager
        self.running: dict[str, Sequence] = self._residents.running  # in the order of admission
        self._ended: list[Sequence] = []
        self._next_step = 0
        self._budget = TokenBudget(config.max_num_batched_tokens)
        self._retelling = Retelling()

    # arrivals and departures

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt and max_tokens must fit max_model_len."""
        assert 0 < len(sequence.prompt) < sequence.most_tokens <= self.config.max_model_len
        sequence.turn = self.counters.joined
        self.waiting.add(sequence)
        self._passed_over.look_again(sequence.tenant)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float = 0.0) -> None:
        """End a sequence in any state; once it has ended, nothing happens. No token of it comes out after this."""
        self.kv_manager.now = now
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self._passed_over.look_again(sequence.tenant)
        self._residents.end(sequence, reason)

    def allow(self, tenant: str, blocks: int | None) -> None:
        """From now on the tenant may hold this many blocks; None: any number."""
        self.kv_manager.allowances.allow(tenant, blocks)
        self._passed_over.look_again(tenant)

    def demand(self, tenant: str) -> int:
        """Blocks that the tenant would hold if it might: those it was denied, and what those it runs may need."""
        return self._limits.demand(tenant)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Let it generate `tokens` more than it was allowed so far, at most its max_tokens in all."""
        sequence.extend(tokens)
        self._passed_over.look_again(sequence.tenant)

    def take_ended(self) -> list[Sequence]:
        """Sequences that `plan` has ended since the last call, because nothing else could free the memory they need."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def preempted(self) -> list[Sequence]:
        """By the last plan, or the last lost step."""
        return self._preemption.preempted

    @property
    def held(self) -> dict[str, Blocked]:
        """Tenants that are passed over for a limit of their own."""
        return self._passed_over.limits

    @property
    def pool(self) -> BlockPool:
        return self.kv_manager.pool

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is in flight."""
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def is_full(self) -> bool:
        """Whether as many steps are in flight as may be."""
        return len(self.in_flight) >= self.config.steps_in_flight

    @property
    def num_kv_slots_unused(self) -> int:
        """Token slots that are allocated but hold no token yet, the lookahead of planned steps included."""
        block_size = self.config.block_size
        return sum(len(s.block_table) * block_size - s.num_computed_tokens for s in self.running.values())

    @property
    def token_budget(self) -> int:
        """Tokens that a step may have at present."""
        return self._budget.tokens

    # planning

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next step, or None when there is nothing to compute or enough steps are already in flight."""
        if self.is_full:
            return None
        self.kv_manager.now = now
        self.blocked, self.blocked_head = None, None
        self._preemption.begin()
        while not (scheduled := self._plan_step()).sequences:
            assert not scheduled.admitted, "a sequence was seated in a step that does not take place"
            if self._preemption.yield_for_the_oldest(scheduled):
                continue
            if not self.in_flight and self._budget.restore():
                continue
            if self.in_flight or self._residents.leaving or all(s in scheduled.paused for s in self.running.values()):
                return None
            if (hopeless := self._preemption.break_deadlock(scheduled)) is not None:
                self._ended.append(hopeless)
                self._residents.end(hopeless, FinishReason.PREEMPTED)
        self._preemption.yield_for_the_oldest(scheduled)
        self._next_step += 1
        scheduled.planned_at = now
        self.in_flight.append(scheduled)
        self._retelling.add_to(scheduled)
        return scheduled.batch

    def _plan_step(self) -> ScheduledStep:
        scheduled = ScheduledStep(Batch(self._next_step))
        self._plan_prefills(self._plan_decodes(scheduled), scheduled)
        return scheduled

    def _plan_decodes(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Every decode that has memory gets its token; returns the sequences that are still prefilling."""
        batch, step = scheduled.batch, scheduled.batch.step
        slots, starts, sequences = batch.slots, batch.starts, scheduled.sequences
        block_size = self.config.block_size
        prefilling = []
        for sequence in list(self.running.values()):
            start = sequence.num_computed_tokens
            if start < sequence.num_admitted_tokens:
                prefilling.append(sequence)
                continue
            if sequence.num_tokens in (start, sequence.token_limit):
                if start < sequence.num_tokens < sequence.most_tokens:
                    scheduled.paused[sequence] = Blocked.TOKENS
                continue  # nothing to compute until its last token is known, or it may have another
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            if start == len(sequence.block_table) * block_size and not self._grow(sequence, 1, scheduled):
                continue
            slots.append(sequence.slot)
            starts.append(start)
            sequences.append(sequence)
            sequence.num_computed_tokens = start + 1
            sequence.num_tokens += 1
            sequence.in_flight += 1
            sequence.last_step = step
        batch.num_decodes = len(slots)
        batch.lengths += [1] * len(slots)
        batch.sampled += range(len(slots))
        scheduled.sampled += sequences
        scheduled.decode_context = sum(starts) + len(starts)
        return prefilling

    def _plan_prefills(self, prefilling: list[Sequence], scheduled: ScheduledStep) -> None:
        """Chunks by class, then by admission; those who wait come before those of a lower class who run."""
        num_decodes = scheduled.batch.num_decodes
        intervals = [s.token_interval for s in scheduled.sequences if s.token_interval is not None]
        tightest, tokens = min(intervals, default=None), self._budget.tokens - num_decodes
        room = self.policy.prefill_room(num_decodes, scheduled.decode_context, tightest, tokens)
        prefilling.sort(key=_BY_CLASS)
        for sequence in prefilling:
            if sequence.priority_class:
                self._admit_waiting(scheduled, room, sequence.priority_class)
            if sequence.status is Status.RUNNING and (length := self._chunk(sequence, room)):
                self._prefill(sequence, length, scheduled, room)
        self._admit_waiting(scheduled, room, None)

    def _chunk(self, sequence: Sequence, room: PrefillRoom) -> int:
        """Tokens of its prefill that this step computes; 0 when it does not fit."""
        start, uncomputed = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
        if self.config.prefill_chunk is None:
            return uncomputed if room.fits(start, uncomputed) == uncomputed else 0
        return room.fits(start, min(uncomputed, self.config.prefill_chunk))

    def _prefill(self, sequence: Sequence, length: int, scheduled: ScheduledStep, room: PrefillRoom) -> None:
        start = sequence.num_computed_tokens
        if self._grow(sequence, length, scheduled):
            self._schedule_chunk(sequence, length, scheduled)
            room.take(start, length)

    def _admit_waiting(self, scheduled: ScheduledStep, room: PrefillRoom, above: int | None) -> None:
        """Admit heads of the queue, all or those of a class more urgent than `above`."""
        closed = self.config.batching is Batching.STATIC and bool(self.running or self.in_flight)
        while (sequence := self._head()) is not None:
            if above is not None and sequence.priority_class >= above:
                break
            length = self._chunk(sequence, room)
            self.blocked = self._obstacle(sequence, length, closed, scheduled)
            if self.blocked in (Blocked.TOKENS, Blocked.ALLOWANCE):
                self._passed_over.hold(sequence.tenant, self.blocked)
                self.blocked = None
                continue
            if self.blocked in (Blocked.SLOTS, Blocked.MEMORY):
                self._preemption.displace(sequence, scheduled)
            if self.blocked is not None:
                self.blocked_head = sequence
                break
            self.waiting.remove(sequence)
            self._start(sequence, scheduled)
            if length:
                self._prefill(sequence, length, scheduled, room)

    def _head(self) -> Sequence | None:
        """Whoever others gave way to, before the queue has one of those first again; else the first in the queue."""
        favoured = self._preemption.favoured
        if favoured and favoured.status is Status.WAITING and favoured.tenant not in self._passed_over.limits:
            return favoured
        return self.waiting.head()

    def _obstacle(self, sequence: Sequence, length: int, closed: bool, scheduled: ScheduledStep) -> Blocked | None:
        """What keeps the head of the queue, whose first chunk would be `length` tokens, from joining this step."""
        if (limit := self._limits.met(sequence, scheduled)) is not None:
            return limit
        if closed:
            return Blocked.BATCH
        if self._residents.leaving:
            return Blocked.RELEASE
        if length == 0 and (self.config.batching is Batching.CONTINUOUS or not scheduled.sequences):
            return Blocked.BUDGET
        if not self.kv_manager.has_free_slot:
            return Blocked.SLOTS
        return None if self._fits(sequence) else Blocked.MEMORY

    def _fits(self, sequence: Sequence) -> bool:
        """Memory for all its tokens now, room for those running to grow, and the policy's word on the future."""
        if not self.kv_manager.fit(sequence, self.kv_manager.room_to_grow(sequence, self.running.values())):
            return False
        if not self.running or self.config.kv_allocation is KVAllocation.CONTIGUOUS:
            return True
        return self.policy.admits(sequence, self._preemption.staying(sequence), self.pool.num_free)

    def _start(self, sequence: Sequence, scheduled: ScheduledStep) -> None:
        self._residents.seat(sequence)
        scheduled.batch.admitted.append(introduce(sequence))
        scheduled.admitted.append(sequence)
        self.policy.admitted(sequence)

    def _grow(self, sequence: Sequence, length: int, scheduled: ScheduledStep) -> bool:
        """Give the sequence blocks for `length` more tokens, preempting others for it if need be."""
        kv_manager, held = self.kv_manager, len(sequence.block_table)
        needed = kv_manager.blocks_to_grow(sequence, length)
        if not needed:
            return True
        if not kv_manager.allowances.permits(sequence.tenant, needed):
            scheduled.paused[sequence] = Blocked.ALLOWANCE
            return False
        blocks = kv_manager.give(sequence, needed)
        if blocks is None:
            self._preemption.make_room(sequence, needed, scheduled.batch.step)
            blocks = kv_manager.give(sequence, needed)
        if blocks is None:
            return False
        scheduled.batch.new_blocks.append((sequence.slot, held, blocks))
        return True

    def _schedule_chunk(self, sequence: Sequence, length: int, scheduled: ScheduledStep) -> None:
        batch, start = scheduled.batch, sequence.num_computed_tokens
        row = len(batch.slots)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.lengths.append(length)
        batch.token_ids += sequence.tokens_at(start, length)
        scheduled.sequences.append(sequence)
        sequence.num_computed_tokens = start + length
        self._bill(sequence, scheduled)
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_tokens += 1
            batch.sampled.append(row)
            scheduled.sampled.append(sequence)
        sequence.in_flight += 1
        sequence.last_step = batch.step

    def _bill(self, sequence: Sequence, scheduled: ScheduledStep) -> None:
        """Prompt tokens count once, however often they are computed."""
        tokens = min(sequence.num_computed_tokens, len(sequence.prompt)) - sequence.num_billed_tokens
        if tokens > 0:
            sequence.num_billed_tokens += tokens
            scheduled.billed.append((sequence, tokens))

    # lost steps

    def rollback(self, now: float = 0.0) -> bool:
        """The device had no memory for the oldest step in flight: it and those behind it are as if never planned.

        The next plan has its number, and as many run as it may have tokens. False when losing goes on for too long.
        """
        self.kv_manager.now = now
        self._preemption.begin()
        self.counters.lost_steps += 1
        failed = self.in_flight[0]
        while self.in_flight:
            scheduled = self.in_flight.pop()
            scheduled.undo()
            self._residents.release(scheduled.sequences)
        self._next_step = failed.batch.step
        feasible = self._budget.lost(failed.num_tokens)
        self._preemption.shed(self._budget.tokens)
        self._retelling.begin(self.running.values())
        return feasible

    # accounting

    def update_from_output(self, output: StepOutput, now: float = 0.0) -> list[Delta]:
        """Account for the oldest step in flight; returns its tokens in row order."""
        self.kv_manager.now = now
        scheduled = self.in_flight.popleft()
        assert scheduled.batch.step == output.step
        self._budget.computed()
        for sequence in scheduled.sequences:
            sequence.in_flight -= 1
        deltas: list[Delta] = []
        for sequence, token_id in zip(scheduled.sampled, output.token_ids, strict=True):
            if sequence.status is Status.FINISHED:
                self.counters.late_tokens += 1
                continue
            if token_id == NO_TOKEN:  # whoever runs the engine ends it, with a word to its client
                deltas.append((sequence, NO_TOKEN, None))
                continue
            generated = sequence.output
            generated.append(token_id)
            reason = None
            if token_id in sequence.end_tokens or len(generated) >= sequence.max_tokens:
                reason = self._end_of(sequence, token_id)
            deltas.append((sequence, token_id, reason))
        self.counters.prompt_tokens += sum(tokens for _, tokens in scheduled.billed)
        self.counters.generation_tokens += len(deltas) - output.token_ids.count(NO_TOKEN)
        self._residents.release(scheduled.sequences)
        return deltas

    def _end_of(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Finish a sequence whose newest token may end it."""
        if token_id in sequence.end_tokens and len(sequence.output) > sequence.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.output) >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return None
        self._residents.end(sequence, reason)
        return reason

    def check_integrity(self) -> None:
        """Every slot and block is free, or held by exactly one sequence that runs, was preempted or is in flight."""
        self._residents.check_integrity(s for scheduled in self.in_flight for s in scheduled.sequences)
