"""A static batch that is padded computes as many tokens as a tensor of its longest rows would have."""

import pytest

from backend.config import Batching
from backend.scheduler.sequence import FinishReason, Sequence
from tests.backend.scheduler.bench import Bench, expected

LENGTHS = ((4, 2), (8, 4), (12, 7))  # of prompts and answers


def padded(**changes: object) -> tuple[Bench, list[Sequence]]:
    fields = {"batching": Batching.STATIC_PADDED, "steps_in_flight": 1, "num_blocks": 64, "max_num_batched_tokens": 40}
    bench = Bench(**(fields | changes))
    return bench, [bench.add(prompt, output) for prompt, output in LENGTHS]


WHOLE, CHUNKED = {"prefill_chunk": None}, {"prefill_chunk": 5, "max_num_batched_tokens": 12}


@pytest.mark.parametrize("changes", [WHOLE, CHUNKED], ids=str)
def test_prompts_are_as_long_as_the_longest_and_rows_last_as_long_as_the_last(changes: dict[str, object]) -> None:
    bench, sequences = padded(**changes)
    bench.drain()
    assert [s.output for s in sequences] == [expected(s) for s in sequences], "and texts are as ever"
    steps = max(len(s.output) for s in sequences)
    computed = sum(batch.num_tokens for batch in bench.batches)
    assert computed == len(LENGTHS) * (12 + steps - 1)
    useful = sum(s.num_prompt_tokens + len(s.output) - 1 for s in sequences)
    assert bench.scheduler.counters.padding_tokens == computed - useful


def test_a_row_of_a_cancelled_sequence_is_padding_and_its_memory_is_freed() -> None:
    bench, sequences = padded(prefill_chunk=None)
    bench.step()
    bench.scheduler.finish_sequence(sequences[2], FinishReason.CANCELLED)
    batch = bench.plan()
    assert batch is not None and len(batch.slots) + len(batch.padding) == 3 and not sequences[2].block_table.blocks
    bench.complete()
    bench.drain()
