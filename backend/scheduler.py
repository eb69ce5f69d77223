"""Which tokens the next step computes: continuous batching with chunked prefill over paged KV memory.

Iteration-level scheduling is Orca's (Yu et al., 2022), paged memory with preemption by recompute vLLM's (Kwon et al.,
2023), prefill in chunks beside the decodes Sarathi-Serve's (Agrawal et al., 2024).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from backend.batch import FEED, Admitted, Batch, StepOutput
from backend.config import Batching, EngineConfig, KVAllocation
from backend.paged_kv.block_pool import BlockPool, ContiguousPool, PagedPool
from backend.sequence import FinishReason, Sequence, Status
from backend.waiting import WaitingQueue


class Delta(NamedTuple):
    """One token of one sequence, and why the sequence ended if it did."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Counters:
    """Totals since start; they never go down."""

    prompt_tokens: int = 0  # computed for the first time
    recomputed_tokens: int = 0  # computed again after a preemption
    generation_tokens: int = 0
    late_tokens: int = 0  # sampled after their sequence had ended; discarded
    preemptions: int = 0


@dataclass(slots=True)
class _InFlight:
    """What the scheduler remembers of a step between planning and completing it."""

    step: int
    sequences: list[Sequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Plans steps and accounts for them. Pure: no clock, no I/O, no tensors; one owner calls it.

    Up to `steps_in_flight` planned steps may be incomplete. Blocks and slot of a sequence that ends or is preempted are
    released when the last step in flight that names it completes, never earlier.
    """

    def __init__(self, config: EngineConfig, waiting: WaitingQueue) -> None:
        self.config = config
        self.pool: BlockPool = _POOLS[config.kv_allocation](config.num_blocks)
        self.waiting = waiting
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.counters = Counters()
        self._in_flight: deque[_InFlight] = deque()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._preempting: dict[str, Sequence] = {}  # blocks still held for steps in flight
        self._next_step = 0

    # arrivals and departures

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt and max_tokens must fit max_model_len."""
        assert 0 < len(sequence.prompt) < len(sequence.prompt) + sequence.max_tokens <= self.config.max_model_len
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state; once it has ended, nothing happens. No token of it comes out after this."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self._finish(sequence, reason)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is in flight."""
        return bool(self.waiting or self.running or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_kv_slots_unused(self) -> int:
        """Token slots that are allocated but hold no token yet, the lookahead of planned steps included."""
        block_size = self.config.block_size
        return sum(len(s.block_table) * block_size - s.num_computed_tokens for s in self.running.values())

    # planning

    def plan(self) -> Batch | None:
        """The next step, or None when there is nothing to compute or two steps are already in flight."""
        if len(self._in_flight) >= self.config.steps_in_flight:
            return None
        batch, flight = Batch(self._next_step), _InFlight(self._next_step)
        budget = self._plan_running(batch, flight)
        self._admit_waiting(batch, flight, budget)
        if not flight.sequences:
            return None
        self._next_step += 1
        self._in_flight.append(flight)
        return batch

    def _plan_running(self, batch: Batch, flight: _InFlight) -> int:
        """Every decode, then prefill chunks in order; returns what is left of the token budget."""
        budget = self.config.max_num_batched_tokens
        prefilling: list[Sequence] = []
        for sequence in list(self.running.values()):
            uncomputed = sequence.num_uncomputed_tokens
            if uncomputed > 1:
                prefilling.append(sequence)
            elif uncomputed == 1 and self._may_continue(sequence) and self._grow(sequence, 1, batch, flight):
                self._schedule(sequence, 1, batch, flight)
                budget -= 1
        for sequence in prefilling:
            length = self._chunk(sequence, budget)
            if length and sequence.status is Status.RUNNING and self._grow(sequence, length, batch, flight):
                self._schedule(sequence, length, batch, flight)
                budget -= length
        return budget

    def _may_continue(self, sequence: Sequence) -> bool:
        """Not preempted while this step was planned, and not waiting for its last pending token."""
        return sequence.status is Status.RUNNING and len(sequence.output) + sequence.num_pending < sequence.max_tokens

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of its prefill that this step computes; 0 when it does not fit."""
        uncomputed = sequence.num_uncomputed_tokens
        if self.config.prefill_chunk is None:
            return uncomputed if uncomputed <= budget else 0
        return min(uncomputed, budget, self.config.prefill_chunk)

    def _admit_waiting(self, batch: Batch, flight: _InFlight, budget: int) -> None:
        static = self.config.batching is Batching.STATIC
        if static and (self.running or self._in_flight):
            return
        while self._free_slots and not self._preempting:
            sequence = self.waiting.head()
            if sequence is None or not self._fits(sequence):
                return
            length = self._chunk(sequence, budget)
            if length == 0 and not static:
                return
            self.waiting.remove(sequence)
            self._start(sequence, batch)
            if length and self._grow(sequence, length, batch, flight):
                self._schedule(sequence, length, batch, flight)
                budget -= length

    def _fits(self, sequence: Sequence) -> bool:
        """Memory for all its tokens now, and a block to spare for each that runs already."""
        if self.config.kv_allocation is KVAllocation.CONTIGUOUS:
            run = self.pool.allocate(self._blocks_up_front(sequence))
            self.pool.release(run or [])
            return run is not None
        return self.pool.num_free >= self.config.blocks_for(sequence.num_tokens) + len(self.running)

    def _start(self, sequence: Sequence, batch: Batch) -> None:
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        self.running[sequence.id] = sequence
        tokens = sequence.prompt + sequence.output
        admitted = Admitted(sequence.slot, sequence.sampling, sequence.seed, tokens, len(sequence.prompt))
        batch.admitted.append(admitted)

    def _blocks_up_front(self, sequence: Sequence) -> int:
        """Blocks of the longest it may become. The last token it samples is never computed."""
        return self.config.blocks_for(len(sequence.prompt) + sequence.max_tokens - 1)

    def _grow(self, sequence: Sequence, length: int, batch: Batch, flight: _InFlight) -> bool:
        """Give the sequence blocks for `length` more tokens, preempting younger ones for it if need be."""
        held = len(sequence.block_table)
        needed = self.config.blocks_for(sequence.num_computed_tokens + length) - held
        if needed <= 0:
            return True
        if self.config.kv_allocation is KVAllocation.CONTIGUOUS:
            needed = self._blocks_up_front(sequence)
        blocks = self.pool.allocate(needed)
        if blocks is None:
            self._make_room(sequence, needed, flight.step)
            blocks = self.pool.allocate(needed)
        if blocks is None:
            return False
        sequence.block_table += blocks
        batch.new_blocks.append((sequence.slot, held, blocks))
        return True

    def _schedule(self, sequence: Sequence, length: int, batch: Batch, flight: _InFlight) -> None:
        start = sequence.num_computed_tokens
        row = len(batch.slots)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.lengths.append(length)
        known = sequence.tokens_at(start, length)
        batch.token_ids += known
        if len(known) < length:
            batch.token_ids.append(FEED)
        sequence.num_computed_tokens = start + length
        if start < len(sequence.prompt):
            self._bill(sequence)
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_pending += 1
            batch.sampled.append(row)
            flight.sampled.append(sequence)
        sequence.in_flight += 1
        sequence.last_step = flight.step
        flight.sequences.append(sequence)

    def _bill(self, sequence: Sequence) -> None:
        """Prompt tokens count once, however often they are computed."""
        computed = min(sequence.num_computed_tokens, len(sequence.prompt))
        if computed > sequence.num_billed_tokens:
            self.counters.prompt_tokens += computed - sequence.num_billed_tokens
            sequence.num_billed_tokens = computed

    # preemption

    def _make_room(self, sequence: Sequence, needed: int, step: int) -> None:
        """Preempt the youngest until `needed` blocks are free or on their way back."""
        coming = self.pool.num_free + sum(len(s.block_table) for s in self._preempting.values())
        for victim in reversed(list(self.running.values())):
            if coming >= needed or victim is sequence:
                return
            if victim.last_step != step:
                coming += len(victim.block_table)
                self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        sequence.num_preemptions += 1
        sequence.status = Status.PREEMPTED
        del self.running[sequence.id]
        self._preempting[sequence.id] = sequence
        self._release_if_idle(sequence)

    # accounting

    def complete(self, output: StepOutput) -> list[Delta]:
        """Account for the oldest step in flight; returns its tokens in row order."""
        flight = self._in_flight.popleft()
        assert flight.step == output.step and len(flight.sampled) == len(output.token_ids)
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        deltas = []
        for sequence, token_id in zip(flight.sampled, output.token_ids, strict=True):
            sequence.num_pending -= 1
            if sequence.status is Status.FINISHED:
                self.counters.late_tokens += 1
            else:
                deltas.append(self._append(sequence, token_id))
        for sequence in flight.sequences:
            if sequence.status is not Status.RUNNING:
                self._release_if_idle(sequence)
        return deltas

    def _append(self, sequence: Sequence, token_id: int) -> Delta:
        self.counters.generation_tokens += 1
        sequence.output.append(token_id)
        reason = None
        if token_id in sequence.end_tokens and len(sequence.output) > sequence.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.output) >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence, reason)
        return Delta(sequence, token_id, reason)

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
        named = {id(s): s for flight in self._in_flight for s in flight.sequences}
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
