import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.backlog import UNMEASURED_DRAIN_RATE, Backlog, DrainMeter, Load
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence
from tests.examples import examples


def sequence(n: int, tenant: str = "a", prompt: int = 8, level: int = 0, arrival: float = 0.0) -> Sequence:
    fields = {"arrival": arrival, "priority_class": level, "body_bytes": 10 * prompt}
    return make_sequence(str(n), tenant, prompt, 8, **fields)


def backlog() -> Backlog:
    return Backlog(lambda sequence, output, cached: 0.1 * sequence.num_prompt_tokens)


def wait(queue: Backlog, sequence: Sequence) -> None:
    queue.add(sequence, queue.load_of(sequence, 8.0))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 2), st.booleans()), max_size=40))
def test_sums_are_those_of_what_waits(steps: list[tuple[str, int, int, bool]]) -> None:
    queue, waiting = backlog(), []
    for n, (tenant, prompt, level, leaves) in enumerate(steps):
        if leaves and waiting:
            left = waiting.pop(n % len(waiting))
            assert queue.discard(left) is not None and queue.discard(left) is None
        else:
            waiting.append(sequence(n, tenant, prompt, level))
            wait(queue, waiting[-1])
        assert queue.total.count == len(waiting)
        assert queue.total.tokens == sum(s.num_prompt_tokens for s in waiting)
        assert queue.total.bytes == 10 * queue.total.tokens
        assert queue.total.seconds == pytest.approx(0.1 * queue.total.tokens)
        for name in "abc":
            assert queue.of(name).tokens == sum(s.num_prompt_tokens for s in waiting if s.tenant == name)
    for each in waiting:
        queue.discard(each)
    assert queue.total == Load() and queue.num_tenants() == 0


def test_the_most_urgent_and_the_oldest_of_those_that_wait_are_known() -> None:
    queue = backlog()
    assert queue.most_urgent("a") is None and queue.oldest(1) is None
    first = sequence(1, "a", level=2, arrival=5.0)
    for one in (first, sequence(2, "a", level=1, arrival=7.0), sequence(3, "b", level=2, arrival=6.0)):
        wait(queue, one)
    assert (queue.most_urgent("a"), queue.most_urgent("b")) == (1, 2)
    assert (queue.oldest(0), queue.oldest(1), queue.oldest(2)) == (None, 7.0, 5.0)
    queue.discard(first)
    assert queue.oldest(2) == 6.0


def drained(rates: list[float]) -> DrainMeter:
    """A queue that never runs empty and drains at these rates, a second each."""
    meter, now = DrainMeter(), 0.0
    meter.sample(True, now)
    for rate in rates:
        for _ in range(4):
            now += 0.25
            meter.left(rate / 4, True, now)
    return meter


def test_the_slow_rate_is_what_nine_in_ten_periods_reached() -> None:
    assert drained([1.0] * 18 + [0.25] * 2 + [1.0]).slow_rate == pytest.approx(1.0)
    assert drained([1.0] * 10 + [0.25] * 10).slow_rate == pytest.approx(0.25)


def test_before_a_period_is_over_a_cautious_rate_is_assumed() -> None:
    assert DrainMeter().slow_rate == UNMEASURED_DRAIN_RATE


def test_a_queue_that_runs_empty_says_nothing() -> None:
    meter = DrainMeter()
    for second in range(100):
        meter.sample(True, second)
        meter.left(0.01, False, second + 0.9)
    assert meter.slow_rate == UNMEASURED_DRAIN_RATE


def test_a_machine_that_stands_still_has_a_rate_above_nothing() -> None:
    assert drained([0.0] * 30).slow_rate > 0
