"""Who has had little goes first, and sinks by what it had."""

from backend.config import Batching
from backend.scheduler.sequence import Sequence
from labs.batchings.multilevel_feedback import FIRST_QUANTUM_TOKENS, SEQUENCES_PER_ROW, STARVATION_S
from tests.backend.paper_device import continuation
from tests.backend.scheduler.bench import Bench

ROWS = 2


def feedback(**changes: object) -> Bench:
    fields: dict[str, object] = dict(
        max_num_seqs=ROWS * SEQUENCES_PER_ROW, max_num_batched_tokens=512, prefill_chunk=512, num_blocks=800
    )
    return Bench(
        **({"batching": Batching.MULTILEVEL_FEEDBACK, "steps_in_flight": 1, "max_model_len": 512} | fields | changes)
    )


def add(bench: Bench, prompt_length: int, max_tokens: int) -> Sequence:
    """A sequence that ends with its last token alone."""
    return bench.add(prompt_length, max_tokens, ends=())


def is_whole(sequence: Sequence) -> bool:
    return sequence.output == continuation(sequence.request.prompt, sequence.request.max_tokens, -1)


def ran(bench: Bench, *sequences: Sequence) -> list[bool]:
    """Which of these the last step computed."""
    return [sequence.slot in bench.batches[-1].slots for sequence in sequences]


def test_a_step_computes_those_of_the_first_levels() -> None:
    bench = feedback()
    old = [add(bench, 4, 300) for _ in range(ROWS)]
    bench.steps(FIRST_QUANTUM_TOKENS)
    new = add(bench, 4, 20)
    bench.steps(2)
    assert ran(bench, new, *old) == [True, True, False], "one place is the newcomer's, which is above them"
    bench.drain()
    assert all(map(is_whole, (new, *old)))


def test_nobody_is_passed_over_for_longer_than_that() -> None:
    bench = feedback()
    old = [add(bench, 4, 300) for _ in range(ROWS)]
    bench.steps(FIRST_QUANTUM_TOKENS)
    young = [add(bench, 4, 200) for _ in range(ROWS)]
    bench.steps(2)
    assert ran(bench, *old) == [False, False]
    bench.now += STARVATION_S
    bench.step()
    assert all(ran(bench, *old)) or all(ran(bench, *young))
    bench.step()
    assert any(ran(bench, *old)), "they are on the first level again"
    bench.drain()
