"""Tokens that a grammar forces are taken at once and computed together: fewer steps, and the same output."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.scheduler.sequence import FinishReason, Sequence
from tests.backend.scheduler.bench import Bench, expected


def answered(bench: Bench, forced: int, most: int = 200) -> int:
    """Serve everything; returns how many steps it took."""
    count = 0
    while bench.scheduler.has_work:
        while bench.plan():
            pass
        bench.complete(forced=forced)
        count += 1
        assert count < most
    return count


def alone(bench: Bench, length: int = 5, tokens: int = 20) -> Sequence:
    sequence = bench.add(length, tokens)
    sequence.logprobs = None
    return sequence


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_take_fewer_steps_for_the_same_output(depth: int) -> None:
    plain, jumping = Bench(steps_in_flight=depth), Bench(steps_in_flight=depth)
    first, second = alone(plain), alone(jumping)
    steps = answered(plain, 0)
    assert answered(jumping, 4) < steps / 1.5
    assert first.output == second.output == expected(first)
    counters = jumping.scheduler.counters
    assert 0 < counters.jump_forward_tokens < counters.generation_tokens == len(second.output)
    assert counters.late_tokens <= depth - 1


def test_forced_tokens_end_a_sequence_where_sampled_ones_would() -> None:
    bench = Bench()
    sequence = alone(bench, tokens=3)
    answered(bench, 30)
    assert sequence.output == expected(sequence)
    assert sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_no_more_is_forced_than_a_sequence_may_have_for_now() -> None:
    bench = Bench()
    sequence = alone(bench)
    sequence.limit_to(3)
    bench.plan()
    bench.complete(forced=8)
    assert len(sequence.output) == 3
    bench.scheduler.raise_token_limit(sequence, 100)
    answered(bench, 8)
    assert sequence.output == expected(sequence)


EVENTS = st.sampled_from(["plan", "complete", "jump2", "jump4", "lose", "add"])


@given(st.lists(EVENTS, max_size=60), st.sampled_from([1, 2]))
def test_the_output_is_the_same_after_all_events(events: list[str], depth: int) -> None:
    bench, sequences = Bench(steps_in_flight=depth, num_blocks=12), []
    for event in events:
        if event == "add":
            sequences.append(alone(bench, 3 + len(sequences) % 4, 12))
        elif event == "plan":
            bench.plan()
        elif bench.in_flight:
            bench.lose() if event == "lose" else bench.complete(forced=int(event[-1]) if event[-1].isdigit() else 0)
    answered(bench, 4, 2000)
    for sequence in sequences:
        assert sequence.output == expected(sequence)
        assert sequence.num_tokens - sequence.num_prompt_tokens - len(sequence.output) <= depth - 1
