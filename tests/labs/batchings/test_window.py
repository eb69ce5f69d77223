"""Requests of one token of output start when enough of them are there, or the oldest has waited long enough."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend.config import Batching
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import Sequence
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
