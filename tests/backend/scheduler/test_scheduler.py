import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from backend.config import Batching, KVAllocation
from backend.scheduler.batching import RULES
from backend.scheduler.block_tables import POOLS
from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.sequence import FinishReason, Sequence
from tests.backend.scheduler.bench import Bench, LossyMachine, expected
from tests.examples import examples


def test_a_lone_sequence_is_prefilled_in_chunks_then_decoded_one_token_a_step() -> None:
    bench = Bench()
    sequence = bench.add(prompt_length=14, max_tokens=3)
    bench.drain()
    assert [batch.lengths for batch in bench.batches][:4] == [[6], [6], [2], [1]]
    assert sequence.output == expected(sequence)


def test_two_steps_are_planned_ahead_and_never_three() -> None:
    bench = Bench()
    bench.add(4, 10)
    assert bench.plan() is not None
    assert bench.plan() is not None
    assert bench.plan() is None


def test_the_step_token_budget_holds_and_decodes_come_first() -> None:
    bench = Bench()
    bench.add(2, 20)
    bench.plan()
    bench.add(20, 4)
    second = bench.plan()
    assert second is not None and second.lengths == [1, 6]
    bench.drain()
    assert all(sum(batch.lengths) <= bench.config.max_num_batched_tokens for batch in bench.batches)


def test_sequences_join_while_others_run() -> None:
    bench = Bench()
    bench.add(3, 20)
    bench.plan(), bench.complete()
    bench.add(3, 20)
    batch = bench.plan()
    assert batch is not None and len(batch.slots) == 2


def test_without_chunking_a_prompt_is_computed_whole() -> None:
    bench = Bench(prefill_chunk=None, max_num_batched_tokens=40)
    bench.add(30, 2)
    bench.add(30, 2)
    bench.drain()
    assert max(max(batch.lengths) for batch in bench.batches) == 30


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    bench = Bench()
    long = bench.add(30, 2)
    long.arrival = 9.0  # when it is due, without other hooks
    bench.plan()
    urgent = bench.add(8, 2)
    batch = bench.plan()
    assert batch is not None
    assert [batch.slots, batch.lengths] == [[urgent.slot, long.slot], [6, 2]]
    bench.drain()


def test_prompt_tokens_are_billed_once_however_often_they_are_computed() -> None:
    bench = Bench(num_blocks=10)
    sequences = [bench.add(6, 25) for _ in range(4)]
    bench.drain()
    assert bench.scheduler.counters.recomputed_tokens > 0
    assert bench.scheduler.counters.prompt_tokens == sum(s.num_prompt_tokens for s in sequences)
    assert bench.scheduler.counters.generation_tokens == sum(len(s.output) for s in sequences)


def test_prompt_tokens_of_a_step_that_was_lost_are_not_billed() -> None:
    bench = Bench()
    sequence = bench.add(20, 4)
    bench.plan()
    bench.complete()
    bench.plan(), bench.plan()
    assert sequence.num_billed_tokens == 18 and bench.scheduler.counters.prompt_tokens == 6
    bench.lose()
    bench.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
    assert sequence.num_billed_tokens == bench.scheduler.counters.prompt_tokens == 6


def test_sequences_that_join_are_counted_each_time() -> None:
    bench = Bench(num_blocks=10)
    sequences = [bench.add(6, 25) for _ in range(4)]
    bench.drain()
    away = sum(s.num_preemptions + s.num_yields for s in sequences)
    assert away and bench.scheduler.counters.admissions == len(sequences) + away


def test_a_token_sampled_after_the_end_is_discarded() -> None:
    bench = Bench()
    sequence = bench.add(3, 20)
    bench.plan(), bench.plan()
    bench.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
    assert bench.scheduler.kv_manager.pool.num_free < bench.config.num_blocks, (
        "blocks stay while a step in flight names them"
    )
    bench.complete(), bench.complete()
    assert sequence.output == [] and bench.scheduler.counters.late_tokens == 2
    assert bench.scheduler.kv_manager.pool.num_free == bench.config.num_blocks


def test_unused_kv_slots_are_counted_with_the_lookahead() -> None:
    bench = Bench()
    bench.add(3, 20)
    bench.plan()
    assert KVAccounts(bench.scheduler.kv_manager).unused_slots().total() == 1


@pytest.mark.parametrize("waits", [True, False])
def test_finishing_twice_changes_nothing(waits: bool) -> None:
    bench = Bench()
    sequence = bench.add(3, 20)
    if not waits:
        bench.plan()
    bench.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
    bench.scheduler.finish_sequence(sequence, FinishReason.STOP)
    assert sequence.finish_reason is FinishReason.CANCELLED
    bench.drain()


class SchedulerMachine(LossyMachine):
    """Arrivals, cancellations, plans, completions and lost steps, over pools that must preempt."""

    @initialize(
        num_blocks=st.integers(4, 16),
        depth=st.integers(1, 2),
        chunk=st.sampled_from([None, 1, 3, 6]),
        allocation=st.deferred(lambda: st.sampled_from(list(POOLS))),
        batching=st.deferred(lambda: st.sampled_from(list(RULES))),
    )
    def start(
        self, num_blocks: int, depth: int, chunk: int | None, allocation: KVAllocation, batching: Batching
    ) -> None:
        self.begin(
            num_blocks=num_blocks,
            max_model_len=min(16, num_blocks * 4),
            max_num_batched_tokens=16 if chunk is None else 8,
            prefill_chunk=chunk,
            steps_in_flight=depth,
            batching=batching,
            kv_allocation=allocation,
        )

    @rule(prompt=st.integers(1, 12), output=st.integers(1, 8))
    def arrive(self, prompt: int, output: int) -> None:
        limit = self.bench.config.max_model_len
        self.sequences.append(self.bench.add(prompt, min(output, limit - prompt)))

    @rule()
    def plan(self) -> None:
        batch = self.bench.plan()
        if batch is not None:
            assert batch.slots, "an empty step was planned"
            assert batch.num_tokens <= self.bench.config.max_num_batched_tokens

    def check_ends(self) -> None:
        super().check_ends()
        assert self.bench.scheduler.counters.prompt_tokens == sum(s.num_billed_tokens for s in self.sequences)
        assert all(s.finish_reason is not FinishReason.PREEMPTED for s in self.sequences)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(35, at_night=3000), stateful_step_count=40, deadline=None)


BUDGET = 16
ROOMY = {"num_blocks": 400, "max_model_len": 200, "max_num_seqs": 12, "max_num_batched_tokens": BUDGET}


def roomy(**changes: object) -> Bench:
    """A bench where memory and slots never bind, a prompt may fill a step, and one step is in flight."""
    return Bench(**(ROOMY | {"prefill_chunk": BUDGET, "steps_in_flight": 1} | changes))


def prefilled(bench: Bench) -> dict[str, int]:
    """The tokens of prompts in the last step, by the sequence that has them, in the order of its rows."""
    step = bench.scheduler.in_flight[-1]
    start = step.batch.num_decodes
    return {s.id: length for s, length in zip(step.sequences[start:], step.batch.lengths[start:], strict=True)}


def due(bench: Bench, tokens: int, at: float) -> Sequence:
    """A sequence that is due at a time: without other hooks, when it arrived."""
    sequence = bench.add(tokens, 2)
    sequence.arrival = at
    return sequence


def begun(bench: Bench, tokens: int, at: float) -> Sequence:
    """A sequence whose prefill has begun."""
    sequence = due(bench, tokens, at)
    bench.step()
    assert 0 < sequence.num_computed_tokens < tokens
    return sequence


def test_a_waiting_prompt_due_earlier_is_computed_before_the_rest_of_a_running_one() -> None:
    bench = roomy()
    long = begun(bench, 128, at=5.0)
    shorts = [due(bench, 4, at=4.0) for _ in range(5)]
    bench.plan()
    assert prefilled(bench) == {short.id: 4 for short in shorts[:4]}
    bench.complete()
    bench.plan()
    assert prefilled(bench) == {shorts[4].id: 4, long.id: BUDGET - 4 - 4}, "beside the tokens of four decodes"
    bench.drain()


def test_a_waiting_prompt_not_due_earlier_is_computed_behind_running_ones() -> None:
    bench = roomy()
    long = begun(bench, 128, at=5.0)
    for at in (5.0, 6.0):
        due(bench, 4, at)
    bench.plan()
    assert prefilled(bench) == {long.id: BUDGET}
    bench.drain()


def test_where_whole_prompts_are_computed_none_is_cut() -> None:
    bench = roomy(prefill_chunk=None, max_num_batched_tokens=64, max_model_len=64)
    first, second = due(bench, 60, at=1.0), due(bench, 40, at=0.0)
    bench.plan()
    assert prefilled(bench) in ({first.id: 60}, {second.id: 40})
    bench.drain()
