"""A device's link: one transfer after another, and never more than its bandwidth carries."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.simulation.pools.link import Link, LinkQueue
from tests.examples import examples


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500), st.booleans()), min_size=1, max_size=30),
    st.floats(10, 1000),
    st.floats(0, 1),
)
def test_it_never_carries_more_than_its_rate(
    shapes: list[tuple[float, int, bool]], rate: float, latency: float
) -> None:
    queue, now, sent = LinkQueue[int](Link(rate, latency)), 0.0, dict[int, int]()
    arrivals, ready = list[tuple[float, int]](), dict[int, float]()

    def until(moment: float) -> None:
        while (at := queue.next_at) <= moment and at < inf:
            arrivals.extend((at, number) for number in queue.arrived(at))

    for number, (gap, size, gives_up) in enumerate(shapes):
        now += gap
        until(now)
        queue.add(number, size, now)
        ready[number] = now
        if not (gives_up and queue.withdraw(number, now)):
            sent[number] = size
    until(inf)
    assert [number for _, number in arrivals] == list(sent), "first come, first served, and each once"
    assert all(at >= ready[number] + sent[number] / rate + latency - 1e-9 for at, number in arrivals)
    for (before, _), (after, number) in pairwise(arrivals):
        assert after - before >= sent[number] / rate - 1e-6
    assert queue.busy * rate == pytest.approx(sum(sent.values()))
