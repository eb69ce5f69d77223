"""Types begin by thresholds of the fluid balance, answers go on by those of their stages; a timer bounds both."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config import Batching
from backend.scheduler.batch import Batch
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import Sequence
from labs.batchings import nested_wait
from labs.batchings.wait import MAX_WAIT_S
from tests.backend.scheduler.bench import Bench, expected

STEP = 1.0  # seconds, so that the arrivals a second are the threshold


class FluidBench(Bench):
    """Every step takes a second; when nobody arrives in it, time stands still."""

    def __init__(self, **changes: object) -> None:
        fields: dict[str, object] = dict(max_num_seqs=16, max_num_batched_tokens=256, prefill_chunk=40, num_blocks=400)
        super().__init__(**({"batching": Batching.WAIT, "steps_in_flight": 1, "max_model_len": 400} | fields | changes))
        execute = self.device.execute

        def timed(batch: Batch) -> Any:
            output = execute(batch)
            output.elapsed = STEP
            return output

        self.device.execute = timed  # type: ignore[method-assign]

    def come(self, at: float, count: int, prompt_length: int = 4, max_tokens: int = 3) -> list[Sequence]:
        self.now = at
        return [self.add(prompt_length, max_tokens) for _ in range(count)]

    def arrival(self, n: int) -> float:
        return self.now

    def settled(self, rate: int) -> None:
        """A number of sequences arrive every second, for a while, and are served."""
        for second in range(40):
            self.come(float(second), rate)
            self.drain_now(float(second))

    def drain_now(self, now: float) -> None:
        while self.plan(now) is not None:
            self.complete()
        while self.scheduler.waiting:
            assert self.scheduler.wakes_at is not None
            self.now = self.scheduler.wakes_at
            while self.plan(self.now) is not None:
                self.complete()


def test_a_batch_of_a_type_starts_when_as_many_wait_as_arrive_in_a_step() -> None:
    bench = FluidBench()
    bench.settled(rate=3)
    bench.come(40.0, 1)
    assert bench.plan(40.0) is None and bench.scheduler.wait_reason is WaitReason.PEERS
    bench.come(40.01, 3)
    batch = bench.plan(40.01)
    assert batch is not None and len(batch.admitted) == 3, "and no more than that"


def test_a_timer_bounds_what_waiting_costs() -> None:
    bench = FluidBench()
    bench.settled(rate=3)
    bench.come(40.0, 1)
    assert bench.plan(40.0) is None and bench.scheduler.wakes_at == 40.0 + MAX_WAIT_S
    batch = bench.plan(40.0 + MAX_WAIT_S)
    assert batch is not None and len(batch.admitted) == 1


STAGES = (2, 5)


@pytest.fixture
def short_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_wait, "STAGE_TOKENS", STAGES)


@pytest.mark.usefixtures("short_stages")
def test_answers_that_go_on_are_gathered_at_their_stages() -> None:
    bench = FluidBench(batching=Batching.NESTED_WAIT)
    for second in range(40):
        bench.come(float(second), 4, max_tokens=8)
        bench.drain_now(float(second))
    early = bench.come(40.0, 4, max_tokens=8)
    while all(s.num_tokens - 4 < STAGES[0] for s in early):
        assert bench.plan(40.0) is not None
        bench.complete()
    assert bench.plan(40.0) is not None, "four of four are there"
    bench.complete()
    bench.drain_now(40.0)
    few = bench.come(41.0, 1, max_tokens=8)
    bench.plan(41.0 + MAX_WAIT_S)
    bench.complete()
    while few[0].num_tokens - 4 < STAGES[0]:
        assert bench.plan() is not None
        bench.complete()
    assert bench.plan() is None and bench.scheduler.wakes_at is not None, "one of four waits for the others"
    assert bench.plan(bench.scheduler.wakes_at) is not None


@pytest.mark.usefixtures("short_stages")
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=20), st.sampled_from([24, 400]))
def test_everybody_has_their_answer_in_the_end(shapes: list[tuple[int, int]], num_blocks: int) -> None:
    for batching in (Batching.WAIT, Batching.NESTED_WAIT):
        bench = FluidBench(batching=batching, num_blocks=num_blocks, max_model_len=40, steps_in_flight=2)
        sequences = [one for shape in shapes for one in bench.come(bench.now + 0.3, 1, *shape)]
        bench.drain()
        assert [s.output for s in sequences] == [expected(s) for s in sequences]
