"""Which tokens the next step computes: continuous batching with chunked prefill over paged KV memory.

Iteration-level scheduling is Orca's (Yu et al., 2022), paged memory with preemption by recompute vLLM's (Kwon et al.,
2023), prefill in chunks beside the decodes Sarathi-Serve's (Agrawal et al., 2024).
"""

from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from backend.batch import Admitted, Batch, StepOutput
from backend.config import Batching, EngineConfig, KVAllocation
from backend.flight import Blocked, Delta, Flight
from backend.paged_kv.block_pool import BlockPool, ContiguousPool, PagedPool
from backend.policy import PlainPolicy, Policy
from backend.sequence import FinishReason, Sequence, Status
from backend.waiting import WaitingQueue

_BY_CLASS = attrgetter("priority_class")


@dataclass(slots=True)
class Counters:
    """Totals since start; they never go down."""

    prompt_tokens: int = 0  # computed for the first time
    recomputed_tokens: int = 0  # computed again after a preemption
    generation_tokens: int = 0
    late_tokens: int = 0  # sampled after their sequence had ended; discarded
    preemptions: int = 0


class Scheduler:
    """Plans steps and accounts for them. Pure: no clock, no I/O, no tensors; one owner calls it.

    Up to `steps_in_flight` planned steps may be incomplete. Blocks and slot of a sequence that ends or is preempted are
    released when the last step in flight that names it completes, never earlier.
    """

    def __init__(self, config: EngineConfig, waiting: WaitingQueue, policy: Policy | None = None) -> None:
        self.config = config
        self.pool: BlockPool = _POOLS[config.kv_allocation](config.num_blocks)
        self.waiting = waiting
        self.policy = policy or PlainPolicy(config)
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.in_flight: deque[Flight] = deque()  # oldest first
        self.blocked: Blocked | None = None  # why the last plan left the head of the queue waiting
        self.preempted: list[Sequence] = []  # by the last plan
        self._ended: list[Sequence] = []
        self.counters = Counters()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._preempting: dict[str, Sequence] = {}  # blocks still held for steps in flight
        self._next_step = 0

    # arrivals and departures

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt and max_tokens must fit max_model_len."""
        assert 0 < len(sequence.prompt) < sequence.most_tokens <= self.config.max_model_len
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state; once it has ended, nothing happens. No token of it comes out after this."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self._finish(sequence, reason)

    def take_ended(self) -> list[Sequence]:
        """Sequences that `plan` has ended since the last call, because nothing else could free the memory they need."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is in flight."""
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def num_kv_slots_unused(self) -> int:
        """Token slots that are allocated but hold no token yet, the lookahead of planned steps included."""
        block_size = self.config.block_size
        return sum(len(s.block_table) * block_size - s.num_computed_tokens for s in self.running.values())

    # planning

    def plan(self) -> Batch | None:
        """The next step, or None when there is nothing to compute or enough steps are already in flight."""
        if len(self.in_flight) >= self.config.steps_in_flight:
            return None
        self.blocked, self.preempted = None, []
        while not (flight := self._plan_step()).sequences:
            if not self.running or self.in_flight or self._preempting:
                return None
            self._break_deadlock()
        self._next_step += 1
        self.in_flight.append(flight)
        return flight.batch

    def _plan_step(self) -> Flight:
        flight = Flight(Batch(self._next_step))
        self._plan_prefills(self._plan_decodes(flight), flight)
        return flight

    def _plan_decodes(self, flight: Flight) -> list[Sequence]:
        """Every decode that has memory gets its token; returns the sequences that are still prefilling."""
        batch, step = flight.batch, flight.batch.step
        slots, starts, sequences = batch.slots, batch.starts, flight.sequences
        block_size = self.config.block_size
        prefilling = []
        for sequence in list(self.running.values()):
            start = sequence.num_computed_tokens
            if start < sequence.num_admitted_tokens:
                prefilling.append(sequence)
                continue
            if sequence.num_tokens in (start, sequence.most_tokens):
                continue  # nothing to compute until its last token is known
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            if start == len(sequence.block_table) * block_size and not self._grow(sequence, 1, flight):
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
        flight.sampled += sequences
        flight.decode_context = sum(starts) + len(starts)
        return prefilling

    def _plan_prefills(self, prefilling: list[Sequence], flight: Flight) -> None:
        """Chunks by class, then by admission; those who wait come before those of a lower class who run."""
        num_decodes = flight.batch.num_decodes
        intervals = [s.token_interval for s in flight.sequences if s.token_interval is not None]
        room = self.policy.prefill_room(num_decodes, flight.decode_context, min(intervals, default=None))
        budget = min(room, self.config.max_num_batched_tokens - num_decodes)
        prefilling.sort(key=_BY_CLASS)
        for sequence in prefilling:
            if sequence.priority_class:
                budget = self._admit_waiting(flight, budget, sequence.priority_class)
            length = self._chunk(sequence, budget)
            if length and sequence.status is Status.RUNNING and self._grow(sequence, length, flight):
                self._schedule_chunk(sequence, length, flight)
                budget -= length
        self._admit_waiting(flight, budget, None)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of its prefill that this step computes; 0 when it does not fit."""
        uncomputed = sequence.num_uncomputed_tokens
        if self.config.prefill_chunk is None:
            return uncomputed if uncomputed <= budget else 0
        return max(0, min(uncomputed, budget, self.config.prefill_chunk))

    def _admit_waiting(self, flight: Flight, budget: int, above: int | None) -> int:
        """Admit heads of the queue, all or those of a class more urgent than `above`; returns the budget left."""
        closed = self.config.batching is Batching.STATIC and bool(self.running or self.in_flight)
        while (sequence := self.waiting.head()) is not None:
            if above is not None and sequence.priority_class >= above:
                break
            length = self._chunk(sequence, budget)
            self.blocked = self._obstacle(sequence, length, closed)
            if self.blocked in (Blocked.SLOTS, Blocked.MEMORY):
                self._displace(sequence)
            if self.blocked is not None:
                break
            self.waiting.remove(sequence)
            self._start(sequence, flight)
            if length and self._grow(sequence, length, flight):
                self._schedule_chunk(sequence, length, flight)
                budget -= length
        return budget

    def _obstacle(self, sequence: Sequence, length: int, closed: bool) -> Blocked | None:
        """What keeps the head of the queue, whose first chunk would be `length` tokens, from joining this step."""
        if closed:
            return Blocked.BATCH
        if self._preempting:
            return Blocked.RELEASE
        if length == 0 and self.config.batching is Batching.CONTINUOUS:
            return Blocked.BUDGET
        if not self._free_slots:
            return Blocked.SLOTS
        return None if self._fits(sequence) else Blocked.MEMORY

    def _fits(self, sequence: Sequence) -> bool:
        """Memory for all its tokens now, a block to spare for each that runs, and the policy's word on the future."""
        if self.config.kv_allocation is KVAllocation.CONTIGUOUS:
            run = self.pool.allocate(self._blocks_up_front(sequence))
            self.pool.release(run or [])
            return run is not None
        num_free = self.pool.num_free
        needed = self.config.blocks_for(sequence.num_tokens) + len(self.running)
        if num_free < needed:
            return False
        return not self.running or self.policy.admits(sequence, self.running.values(), num_free)

    def _start(self, sequence: Sequence, flight: Flight) -> None:
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.num_admitted_tokens = sequence.num_tokens
        self.running[sequence.id] = sequence
        tokens = [*sequence.prompt, *sequence.output]
        admitted = Admitted(sequence.slot, sequence.sampling, sequence.seed, tokens, len(sequence.prompt))
        flight.batch.admitted.append(admitted)
        flight.admitted.append(sequence)
        self.policy.admitted(sequence)

    def _blocks_up_front(self, sequence: Sequence) -> int:
        """Blocks of the longest it may become. The last token it samples is never computed."""
        return self.config.blocks_for(sequence.most_tokens - 1)

    def _grow(self, sequence: Sequence, length: int, flight: Flight) -> bool:
        """Give the sequence blocks for `length` more tokens, preempting others for it if need be."""
        held = len(sequence.block_table)
        needed = self.config.blocks_for(sequence.num_computed_tokens + length) - held
        if needed <= 0:
            return True
        if self.config.kv_allocation is KVAllocation.CONTIGUOUS:
            needed = self._blocks_up_front(sequence)
        blocks = self.pool.allocate(needed)
        if blocks is None:
            self._make_room(sequence, needed, flight.batch.step)
            blocks = self.pool.allocate(needed)
        if blocks is None:
            return False
        sequence.block_table += blocks
        flight.batch.new_blocks.append((sequence.slot, held, blocks))
        return True

    def _schedule_chunk(self, sequence: Sequence, length: int, flight: Flight) -> None:
        batch, start = flight.batch, sequence.num_computed_tokens
        row = len(batch.slots)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.lengths.append(length)
        batch.token_ids += sequence.tokens_at(start, length)
        flight.sequences.append(sequence)
        sequence.num_computed_tokens = start + length
        self._bill(sequence)
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_tokens += 1
            batch.sampled.append(row)
            flight.sampled.append(sequence)
        sequence.in_flight += 1
        sequence.last_step = batch.step

    def _bill(self, sequence: Sequence) -> None:
        """Prompt tokens count once, however often they are computed."""
        computed = min(sequence.num_computed_tokens, len(sequence.prompt))
        if computed > sequence.num_billed_tokens:
            self.counters.prompt_tokens += computed - sequence.num_billed_tokens
            sequence.num_billed_tokens = computed

    # preemption

    def _make_room(self, sequence: Sequence, needed: int, step: int) -> None:
        """Preempt sequences that rank below this one until `needed` blocks are free or on their way back."""
        own = self._victim_key(sequence)
        self._preempt_for(needed, [s for s in self._victims(step) if self._victim_key(s) > own])

    def _displace(self, sequence: Sequence) -> None:
        """A head that found no slot or no memory takes those of running sequences of a lower class, after this step."""
        lower = [s for s in self._victims(None) if s.priority_class > sequence.priority_class]
        if lower and not self._free_slots:
            self._preempt(lower.pop(0))
        self._preempt_for(self.config.blocks_for(sequence.num_tokens) + len(self.running), lower)

    def _preempt_for(self, needed: int, candidates: list[Sequence]) -> None:
        coming = self.pool.num_free + sum(len(s.block_table) for s in self._preempting.values())
        if coming + sum(len(s.block_table) for s in candidates) < needed:
            return
        for victim in candidates:
            if coming >= needed:
                return
            coming += len(victim.block_table)
            self._preempt(victim)

    def _victims(self, step: int | None) -> list[Sequence]:
        """Who may be preempted, first choice first: not in `step`, not too often, not before making progress."""
        most = self.config.max_preemptions
        eligible = [
            s
            for s in self.running.values()
            if s.last_step != step
            and s.num_preemptions < most
            and (s.num_preemptions == 0 or len(s.output) > s.num_kept_tokens)
        ]
        return sorted(eligible, key=self._victim_key, reverse=True)

    def _victim_key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.priority_class, *self.policy.victim_rank(sequence))

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self.preempted.append(sequence)
        sequence.num_preemptions += 1
        sequence.num_kept_tokens = len(sequence.output)
        sequence.status = Status.PREEMPTED
        del self.running[sequence.id]
        self._preempting[sequence.id] = sequence
        self._release_if_idle(sequence)

    def _break_deadlock(self) -> None:
        """Everyone who runs waits for memory that only another could give: the last choice gives way, for good if it
        has been preempted as often as it may.
        """
        victim = max(self.running.values(), key=self._victim_key)
        if victim.num_preemptions < self.config.max_preemptions:
            self._preempt(victim)
        else:
            self._ended.append(victim)
            self._finish(victim, FinishReason.PREEMPTED)

    # accounting

    def complete(self, output: StepOutput) -> list[Delta]:
        """Account for the oldest step in flight; returns its tokens in row order."""
        flight = self.in_flight.popleft()
        assert flight.batch.step == output.step
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        deltas: list[Delta] = []
        for sequence, token_id in zip(flight.sampled, output.token_ids, strict=True):
            if sequence.status is Status.FINISHED:
                self.counters.late_tokens += 1
                continue
            generated = sequence.output
            generated.append(token_id)
            reason = None
            if token_id in sequence.end_tokens or len(generated) >= sequence.max_tokens:
                reason = self._end_of(sequence, token_id)
            deltas.append((sequence, token_id, reason))
        self.counters.generation_tokens += len(deltas)
        for sequence in flight.sequences:
            if sequence.status is not Status.RUNNING:
                self._release_if_idle(sequence)
        return deltas

    def _end_of(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Finish a sequence whose newest token may end it."""
        if token_id in sequence.end_tokens and len(sequence.output) > sequence.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.output) >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return None
        self._finish(sequence, reason)
        return reason

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.running.pop(sequence.id, None)
        self._preempting.pop(sequence.id, None)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        """Free blocks and slot, unless a step in flight still names the sequence; a preempted one waits again."""
        if sequence.in_flight or sequence.slot < 0:
            return
        self.pool.release(sequence.block_table)
        self._free_slots.append(sequence.slot)
        sequence.block_table, sequence.slot = [], -1
        if sequence.status is Status.PREEMPTED:
            self.counters.recomputed_tokens += sequence.num_computed_tokens
            sequence.num_computed_tokens = 0
            sequence.status = Status.WAITING
            del self._preempting[sequence.id]
            self.waiting.restore(sequence)

    def check_integrity(self) -> None:
        """Every block is free or owned by exactly one sequence that holds a slot."""
        self.pool.check_integrity()
        named = {id(s): s for flight in self.in_flight for s in flight.sequences}
        holders = {id(s): s for s in (*self.running.values(), *self._preempting.values())} | named
        owned = [block for s in holders.values() for block in s.block_table]
        assert len(owned) == len(set(owned)), "two sequences own one block"
        assert len(owned) + self.pool.num_free == self.config.num_blocks, "blocks were lost"
        slots = [s.slot for s in holders.values() if s.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), "slots were lost"


_POOLS: dict[KVAllocation, type[PagedPool] | type[ContiguousPool]] = {
    KVAllocation.PAGED: PagedPool,
    KVAllocation.CONTIGUOUS: ContiguousPool,
}
