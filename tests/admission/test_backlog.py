"""The backlog's sums are those of what waits, whatever comes and goes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.backlog import Backlog
from admission.load import Load
from admission.queue_bounds import QueueBounds
from backend.sampling import SamplingParams
from backend.sequence import Sequence

AGING = Aging(2.0)


def sequence(n: int, tenant: str = "a", prompt: int = 8, level: int = 0, arrival: float = 0.0) -> Sequence:
    return Sequence(
        str(n), tenant, [0] * prompt, SamplingParams(), 8, 0, frozenset(), arrival, level, body_bytes=10 * prompt
    )


def backlog() -> Backlog:
    return Backlog(lambda s: 0.1 * len(s.prompt))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 2), st.booleans()), max_size=40))
def test_sums_are_those_of_what_waits(steps: list[tuple[str, int, int, bool]]) -> None:
    queue, waiting = backlog(), []
    for n, (tenant, prompt, level, leaves) in enumerate(steps):
        if leaves and waiting:
            left = waiting.pop(n % len(waiting))
            assert queue.discard(left) is not None and queue.discard(left) is None
        else:
            waiting.append(sequence(n, tenant, prompt, level))
            queue.add(waiting[-1])
            queue.add(waiting[-1])
        assert queue.total.count == len(waiting)
        assert queue.total.tokens == sum(len(s.prompt) for s in waiting)
        assert queue.total.bytes == 10 * queue.total.tokens
        assert queue.total.seconds == pytest.approx(0.1 * queue.total.tokens)
        for name in "abc":
            assert queue.of(name).tokens == sum(len(s.prompt) for s in waiting if s.tenant == name)
    for each in waiting:
        queue.discard(each)
    assert queue.total == Load() and queue.num_tenants == 0


def test_a_lower_class_is_before_a_newcomer_only_once_it_has_aged() -> None:
    queue = backlog()
    queue.add(sequence(1, level=1, arrival=0.0))
    assert queue.tokens_before("a", 1.0, 0.0, 0, AGING) == 0
    assert queue.tokens_before("a", 2.5, 0.0, 0, AGING) == 8
    assert queue.tokens_before("a", 1.0, 0.0, 1, AGING) == queue.tokens_before("a", 1.0, 0.0, 2, AGING) == 8


@pytest.mark.parametrize("unit", ["count", "tokens", "bytes", "seconds"])
def test_each_bound_is_kept_and_named(unit: str) -> None:
    waiting, newcomer = Load(2, 20, 200, 2.0), Load(1, 10, 100, 1.0)
    most = getattr(waiting, unit) + getattr(newcomer, unit)
    assert QueueBounds(**{unit: most}).excess(waiting, newcomer) is None
    excess = QueueBounds(**{unit: most - 0.5}).excess(waiting, newcomer)
    assert excess is not None and (excess.unit, excess.load) == (unit, most)


def test_an_empty_queue_takes_anything() -> None:
    assert QueueBounds(count=1, tokens=1, bytes=1, seconds=1e-9).excess(Load(), Load(1, 10, 10, 1.0)) is None


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a bound on waiting bytes must be above 0, got 0"):
        QueueBounds(bytes=0)
