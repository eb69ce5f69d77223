"""Requests of one token of output start when enough of them are there, or the oldest has waited long enough."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend.config import Batching
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import FinishReason, Sequence
from labs.batchings.window import DEFAULT_MAX_DELAY_S
from tests.backend.scheduler.bench import Bench, expected


class WindowBench(Bench):
    def __init__(self, **changes: object) -> None:
        fields: dict[str, object] = dict(
            batching=Batching.WINDOW, preferred_batch_sizes=(2, 4), max_num_seqs=8, max_num_batched_tokens=64
        )
        super().__init__(**(fields | {"num_blocks": 64, "prefill_chunk": 16} | changes))

    def come(self, at: float, prompt_length: int = 4, max_tokens: int = 1) -> Sequence:
        self.now = at
        return self.add(prompt_length, max_tokens)

    def arrival(self, n: int) -> float:
        return self.now


def test_a_batch_starts_at_a_preferred_size_the_largest_that_is_filled() -> None:
    bench = WindowBench()
    bench.come(0.0)
    assert bench.plan(0.0) is None and bench.scheduler.wait_reason is WaitReason.PEERS
    assert bench.scheduler.wakes_at == DEFAULT_MAX_DELAY_S
    for _ in range(4):
        bench.come(0.001)
    batch = bench.plan(0.001)
    assert batch is not None and len(batch.slots) == 4, "the fifth waits for another, or for its time"
    assert len(bench.scheduler.waiting) == 1


def test_the_oldest_waits_for_the_longest_delay_and_no_longer() -> None:
    bench = WindowBench()
    bench.come(1.0)
    assert bench.plan(1.0) is None and bench.plan(1.0 + DEFAULT_MAX_DELAY_S - 1e-6) is None
    batch = bench.plan(1.0 + DEFAULT_MAX_DELAY_S)
    assert batch is not None and len(batch.slots) == 1 and bench.scheduler.wakes_at is None


def test_those_of_other_lengths_are_no_company_and_longer_answers_need_none() -> None:
    bench = WindowBench()
    bench.come(0.0, prompt_length=4), bench.come(0.0, prompt_length=17)
    assert bench.plan(0.0) is None, "within a power of two"
    bench = WindowBench()
    long = bench.come(0.0, max_tokens=3)
    assert bench.plan(0.0) is not None and long.slot >= 0


def test_a_cancelled_sequence_leaves_its_window() -> None:
    bench = WindowBench()
    first, _ = bench.come(0.0), bench.come(0.0)
    bench.scheduler.finish_sequence(first, FinishReason.CANCELLED)
    assert bench.plan(0.0) is None


@given(st.lists(st.tuples(st.floats(0, 0.02), st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=30))
def test_nobody_waits_longer_than_the_delay_while_there_is_room(requests: list[tuple[float, int, int]]) -> None:
    bench = WindowBench(max_num_seqs=32, max_num_batched_tokens=1024, num_blocks=400, prefill_chunk=20)
    begun: dict[Sequence, float] = {}
    sequences = []
    times = sorted({at for at, _, _ in requests})
    for now, following in pairwise([*times, 1.0]):
        sequences += [bench.come(now, *shape) for at, *shape in requests if at == now]
        at: float | None = now
        while at is not None and at <= following:
            while bench.plan(at) is not None:
                bench.complete()
            begun |= {s: at for s in sequences if s not in begun and s.output}
            at = bench.scheduler.wakes_at
    assert [s.output for s in sequences] == [expected(s) for s in sequences]
    assert all(begun[s] - s.arrival <= DEFAULT_MAX_DELAY_S + 1e-9 for s in sequences)
