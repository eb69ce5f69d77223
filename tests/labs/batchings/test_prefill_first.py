"""A step computes prompts or decodes, and prompts first."""

from backend.config import Batching
from tests.backend.scheduler.bench import Bench, expected


def test_prompts_are_packed_into_steps_of_their_own_while_decodes_stand_still() -> None:
    bench = Bench(batching=Batching.PREFILL_FIRST, steps_in_flight=1, num_blocks=64, max_num_batched_tokens=40)
    running = bench.add(4, 6)
    bench.step()
    late = [bench.add(6, 2) for _ in range(3)]
    bench.steps(2)
    shapes = [(batch.num_decodes, len(batch.slots)) for batch in bench.batches]
    assert shapes == [(0, 1), (0, 3), (4, 4)]
    bench.drain()
    assert [s.output for s in (running, *late)] == [expected(s) for s in (running, *late)]
