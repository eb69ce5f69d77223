"""Hits and first tokens are told of the worst tenant, not of the mean."""

import pytest

from labs.benchmarks.prefix_cache import lru_found
from labs.benchmarks.prefix_tenants import Served, of_lru, of_off, with_tenants
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content


def asked(tenant: str, tokens: int = 160) -> Arrival:
    return Arrival(0.0, tokens, 1, tenant=tenant, content=Content((1,), None))


def tenant(arrival: Arrival) -> str:
    return arrival.tenant


def test_an_exact_lru_tells_tenants_apart_and_gives_up_what_was_used_longest_ago() -> None:
    arrivals = [asked("a"), asked("a"), asked("b"), asked("a"), asked("b")]
    assert lru_found(arrivals, blocks=20) == [0, 144, 0, 144, 144]
    assert lru_found(arrivals, blocks=10) == [0, 144, 0, 0, 0]


def test_the_worst_is_told_of_tenants_with_enough_requests() -> None:
    best = [(asked("a"), 1000), (asked("b"), 500), (asked("rare"), 5)]
    served = [Served(asked("a"), 1.0, 990), Served(asked("b"), 1.0, 450), Served(asked("rare"), 1.0, 0)]
    assert of_lru(served, best, tenant) == 0.9
    assert of_lru(served, best, lambda _: 0) == pytest.approx(1440 / 1505)
    without = [Served(asked(name), 2.0, 0) for name in "ab" for _ in range(60)]
    cached = [Served(asked(name), seconds, 0) for name, seconds in (("a", 1.0), ("b", 1.5)) for _ in range(60)]
    assert of_off([*cached, Served(asked("rare"), 9.0, 0)], without, 0.5, tenant) == 0.75


def test_sessions_are_kept_whole() -> None:
    arrivals = [Arrival(n, 10, 1, session=n % 7) for n in range(100)]
    made = with_tenants(arrivals, [1.0] * 5, seed=1)
    assert len({(one.session, one.tenant) for one in made}) == 7
    assert len({one.tenant for one in made}) > 1
