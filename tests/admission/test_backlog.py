from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.backlog import UNMEASURED, Backlog, DrainMeter, Load, QueuePosition
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence
from tests.examples import examples

AGING = Aging(2.0)


def sequence(n: int, tenant: str = "a", prompt: int = 8, level: int = 0, arrival: float = 0.0) -> Sequence:
    fields = {"arrival": arrival, "priority_class": level, "body_bytes": 10 * prompt}
    return make_sequence(str(n), tenant, prompt, 8, **fields)


def backlog() -> Backlog:
    return Backlog(lambda prompt, output, cached: 0.1 * prompt, AGING)


def wait(queue: Backlog, sequence: Sequence) -> None:
    queue.add(sequence, queue.load_of(sequence, 8.0))


@settings(max_examples=examples(200), deadline=None)
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
            wait(queue, waiting[-1])
        assert queue.total.count == len(waiting)
        assert queue.total.tokens == sum(len(s.prompt) for s in waiting)
        assert queue.total.bytes == 10 * queue.total.tokens
        assert queue.total.seconds == pytest.approx(0.1 * queue.total.tokens)
        for name in "abc":
            assert queue.of(name).tokens == sum(len(s.prompt) for s in waiting if s.tenant == name)
    for each in waiting:
        queue.discard(each)
    assert queue.total == Load() and queue.num_tenants == 0


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


def turn(now: float, level: int = 0, within: float | None = None) -> QueuePosition:
    newcomer = sequence(0, level=level, arrival=now)
    newcomer.first_token_by = None if within is None else now + within
    return QueuePosition.of(newcomer, AGING)


def test_a_lower_class_is_before_a_newcomer_only_once_it_has_aged() -> None:
    queue = backlog()
    wait(queue, sequence(1, level=1, arrival=0.0))
    assert queue.before("a", turn(1.0))[0] == 0
    assert queue.before("a", turn(2.5))[0] == 8
    assert queue.before("a", turn(1.0, level=1))[0] == queue.before("a", turn(1.0, level=2))[0] == 8


def test_what_presses_is_behind_what_is_due_before_it_and_has_an_order_of_its_own() -> None:
    queue = backlog()
    for n, arrival in enumerate((0.0, 1.0, 2.0)):
        wait(queue, sequence(n, prompt=2**n, arrival=arrival))
    assert [queue.before("a", turn(1.5, within=seconds))[0] for seconds in (0.4, 1.0, 2.0, 3.0)] == [0, 1, 3, 7]
    calm, urgent = sequence(3), sequence(4)
    calm.first_token_by, urgent.first_token_by = 3.0, 2.0
    for pressing in (calm, urgent):
        wait(queue, pressing)
    assert [one for _, _, one, _ in queue.pressing] == [urgent, calm]
    assert queue.before("a", turn(20.0)) == (7, 3), "it does not count among those that do not press"
    assert queue.of("a").count == 5
    queue.discard(urgent)
    assert [one for _, _, one, _ in queue.pressing] == [calm]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50), st.integers(0, 2), st.booleans()), max_size=30),
    st.floats(0, 100),
    st.sets(st.sampled_from("abcd")),
)
def test_what_lies_within_a_cap_is_counted_by_tenant_and_class(
    arrivals: list[tuple[str, int, int, bool]], cap: float, besides: set[str]
) -> None:
    queue, tokens = backlog(), Counter[tuple[str, int]]()
    for n, (tenant, prompt, level, leaves) in enumerate(arrivals):
        wait(queue, waiting := sequence(n, tenant, prompt, level))
        if leaves:
            queue.discard(waiting)
        else:
            tokens[tenant, level] += prompt
    expected = sum(min(waiting, cap) for (tenant, _), waiting in tokens.items() if tenant not in besides)
    assert queue.within(cap, besides) == pytest.approx(expected)


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
    assert DrainMeter().slow_rate == UNMEASURED


def test_a_queue_that_runs_empty_says_nothing() -> None:
    meter = DrainMeter()
    for second in range(100):
        meter.sample(True, second)
        meter.left(0.01, False, second + 0.9)
    assert meter.slow_rate == UNMEASURED


def test_a_machine_that_stands_still_has_a_rate_above_nothing() -> None:
    assert drained([0.0] * 30).slow_rate > 0
