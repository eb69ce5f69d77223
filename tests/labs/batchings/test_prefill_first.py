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


def test_decodes_go_on_where_no_prompt_has_room() -> None:
    bench = Bench(batching=Batching.PREFILL_FIRST, steps_in_flight=1, max_num_seqs=1)
    bench.add(4, 3), bench.add(4, 3)
    bench.steps(3)
    assert [batch.num_decodes for batch in bench.batches] == [0, 1, 1]
    bench.drain()
