"""The whole core, any interleaving of events, over a device on paper that checks every context it is given."""

import math
from collections import deque
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from admission.core import CoreConfig, Memory, Order, Unit, make_core
from admission.fair_queue import FairQueue
from admission.outcome import QueueFull
from backend.batch import Batch, StepOutput
from backend.config import EngineConfig
from backend.sampling import SamplingParams
from backend.sequence import FinishReason, Sequence, Status
from tests.backend.paper_device import PaperDevice, continuation

END = 3


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 16),
        depth=st.integers(1, 2),
        chunk=st.sampled_from([None, 1, 5]),
        order=st.sampled_from(list(Order)),
        unit=st.sampled_from(list(Unit)),
        memory=st.sampled_from(list(Memory)),
        borrow=st.sampled_from([0.0, 5.0]),
        share=st.sampled_from([0.3, 1.0]),
        most=st.sampled_from([1, 3]),
    )
    def start(
        self,
        num_blocks: int,
        depth: int,
        chunk: int | None,
        order: Order,
        unit: Unit,
        memory: Memory,
        borrow: float,
        share: float,
        most: int,
    ) -> None:
        engine = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=min(20, num_blocks * 4),
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=20 if chunk is None else 8,
            prefill_chunk=chunk,
            steps_in_flight=depth,
            max_preemptions=most,
        )
        config = CoreConfig(
            order=order, unit=unit, quantum=3.0, borrow=borrow, memory=memory, prefill_share=share, max_waiting=12
        )
        self.core = make_core(config, engine)
        self.unit = unit
        self.most_preemptions = most
        self.device = PaperDevice(engine.block_size)
        self.flying: deque[Batch] = deque()
        self.sequences: list[Sequence] = []
        self.ended_early: dict[Sequence, int] = {}
        self.now = 0.0
        self.busy = 0.0
        self.names = count()
        self.totals = (0, 0, 0, 0, 0)

    @rule(
        tenant=st.sampled_from("abc"),
        level=st.integers(0, 2),
        prompt=st.integers(1, 14),
        output=st.integers(1, 8),
        interval=st.sampled_from([None, 1e-9, 0.1]),
    )
    def arrive(self, tenant: str, level: int, prompt: int, output: int, interval: float | None) -> None:
        n = next(self.names)
        room = self.core.scheduler.config.max_model_len - prompt
        sequence = Sequence(
            f"s{n}",
            tenant,
            [n + 10 + i for i in range(prompt)],
            SamplingParams(),
            min(output, room),
            0,
            frozenset([END]),
        )
        sequence.priority_class, sequence.token_interval = level, interval
        try:
            self.core.arrive(sequence, self.now)
            self.sequences.append(sequence)
        except QueueFull as refusal:
            assert refusal.waiting >= 12  # noqa: PT017 - more when preempted ones have come back

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.status is not Status.FINISHED:
            self.ended_early[sequence] = len(sequence.output)
        self.core.finish(sequence, FinishReason.CANCELLED, self.now)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def plan(self) -> None:
        scheduler = self.core.scheduler
        room = len(scheduler.in_flight) < scheduler.config.steps_in_flight
        batch = self.core.plan(self.now)
        for sequence in self.core.take_ended():
            assert sequence.num_preemptions == scheduler.config.max_preemptions
            self.ended_early[sequence] = len(sequence.output)
        if batch is not None:
            assert batch.slots, "an empty step was planned"
            assert sum(batch.lengths) <= scheduler.config.max_num_batched_tokens
            self.flying.append(batch)
        elif room and len(scheduler.waiting):
            assert scheduler.blocked is not None or scheduler.preempted, "somebody waits for no reason"
        self.everyone_who_could_decode_does(batch)

    def everyone_who_could_decode_does(self, batch: Batch | None) -> None:
        """Within a step, whoever runs, is past its prefill and has memory gets a token."""
        if batch is None:
            return
        scheduler = self.core.scheduler
        for sequence in scheduler.running.values():
            decoding = sequence.num_admitted_tokens <= sequence.num_computed_tokens < sequence.num_tokens
            has_memory = sequence.num_computed_tokens < len(sequence.block_table) * scheduler.config.block_size
            done = sequence.num_tokens == sequence.most_tokens
            assert not (decoding and has_memory and not done) or sequence.last_step == batch.step

    @precondition(lambda self: self.flying)
    @rule(elapsed=st.floats(0.001, 2))
    def complete(self, elapsed: float) -> None:
        output = self.device.execute(self.flying.popleft())
        self.busy += elapsed
        self.core.complete(StepOutput(output.step, output.token_ids, elapsed), self.now)

    @invariant()
    def blocks_and_slots_are_conserved(self) -> None:
        if hasattr(self, "core"):
            self.core.scheduler.check_integrity()

    @invariant()
    def counters_never_go_down(self) -> None:
        if hasattr(self, "core"):
            counters = self.core.scheduler.counters
            totals = (
                counters.prompt_tokens,
                counters.recomputed_tokens,
                counters.generation_tokens,
                counters.late_tokens,
                counters.preemptions,
            )
            assert all(new >= old for new, old in zip(totals, self.totals, strict=True))
            self.totals = totals

    @invariant()
    def nobody_is_preempted_too_often(self) -> None:
        if hasattr(self, "core"):
            assert all(s.num_preemptions <= self.most_preemptions for s in self.sequences)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        while scheduler.has_work:
            while True:
                before = len(self.flying)
                self.plan()
                if len(self.flying) == before:
                    break
            if self.flying:
                self.complete(0.5)
        assert scheduler.pool.num_free == scheduler.config.num_blocks
        for sequence in self.sequences:
            if sequence in self.ended_early:
                assert len(sequence.output) == self.ended_early[sequence], "a token came after the end"
            else:
                assert sequence.output == continuation(sequence.prompt, sequence.max_tokens, END)
        self.charges_sum_to_busy_time()

    def charges_sum_to_busy_time(self) -> None:
        queue = self.core.scheduler.waiting
        if isinstance(queue, FairQueue) and self.unit is Unit.ENGINE_TIME:
            charged = sum(account.charged for account in queue.accounts.values())
            assert math.isclose(charged, self.busy, rel_tol=1e-9, abs_tol=1e-9)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=1000, stateful_step_count=40, deadline=None)
