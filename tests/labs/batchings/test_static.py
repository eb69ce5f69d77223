"""A batch admits nobody until it has drained, and is filled beyond one step's budget."""

from backend.config import Batching
from backend.scheduler.sequence import FinishReason, SequenceStatus
from tests.backend.scheduler.bench import Bench, expected


def test_static_batching_lets_nobody_join_until_the_batch_has_drained() -> None:
    bench = Bench(batching=Batching.STATIC)
    first = bench.add(3, 6)
    bench.plan()
    bench.add(3, 6)
    while first.status is not SequenceStatus.FINISHED:
        batch = bench.plan()
        assert batch is None or len(batch.slots) == 1
        bench.complete()
    bench.drain()


def test_static_batching_fills_its_batch_beyond_one_steps_budget() -> None:
    bench = Bench(batching=Batching.STATIC)
    sequences = [bench.add(6, 4) for _ in range(4)]
    bench.plan()
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in sequences)
    bench.drain()


def test_static_batching_without_chunking_seats_nobody_whose_prompt_a_smaller_step_cannot_hold() -> None:
    bench = Bench(batching=Batching.STATIC, prefill_chunk=None, max_num_batched_tokens=40)
    lost = bench.add(12, 4)
    bench.plan()
    bench.lose()
    bench.scheduler.finish_sequence(lost, FinishReason.CANCELLED)
    sequence = bench.add(30, 4)
    batch = bench.plan()
    assert batch is not None and [admitted.slot for admitted in batch.admitted] == [sequence.slot]
    bench.drain()
    assert sequence.output == expected(sequence)
