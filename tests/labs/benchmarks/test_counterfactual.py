"""What would have become of the refused: found out in another world, without a trace in this one."""

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from multiprocessing import get_context

import pytest

from labs.process_pool import process_pool
from labs.simulation.arrival import Arrival
from tests.labs.benchmarks.forked_worlds import Found, look_into

DEADLINE = "order=fair,overload=deadline"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the world is forked by the operating system")


@pytest.fixture(scope="module")
def apart() -> Iterator[Executor]:
    with process_pool(1, get_context("spawn")) as pool:
        yield pool


def looked_into(apart: Executor, arrivals: list[Arrival], every: int) -> Found:
    return apart.submit(look_into, DEADLINE, arrivals, every).result()


def crowd() -> list[Arrival]:
    return [Arrival(n / 12, 600 + 100 * (n % 9), 20 + n % 50, tenant=f"{n % 3}", deadline=2.0) for n in range(300)]


def test_the_refused_keep_their_deadline_in_the_other_world(apart: Executor) -> None:
    arrivals = [Arrival(0.0, 6000, 10, tenant="a"), Arrival(0.1, 100, 10, tenant="b", deadline=0.01)]
    assert looked_into(apart, arrivals, 1) == (["0 good", "1 refused"], [False], [0])


def test_a_request_that_would_have_been_in_time_was_wrongly_refused(apart: Executor) -> None:
    """Before twenty estimates were held against the truth they are widened by a quarter, if others are waited for."""
    arrivals = [Arrival(float(n), 4000, 10, tenant="a") for n in range(10)]
    arrivals += [Arrival(9.005, 100, 10, tenant="c", deadline=0.6)]
    arrivals += [Arrival(9.01, 4000, 10, tenant="b", deadline=1.0)]
    outcomes, was_good, gains = looked_into(apart, arrivals, 1)
    assert (outcomes[-1], was_good, gains) == ("11 refused", [True], [1])


def test_looking_changes_nothing_in_the_run_and_tells_the_harm_to_others(
    apart: Executor,
) -> None:
    blind, seeing = (looked_into(apart, crowd(), every) for every in (0, 5))
    refused = sum(outcome.endswith("refused") for outcome in blind[0])
    assert blind[0] == seeing[0]
    assert len(blind[1]) == 0 and len(seeing[1]) == refused // 5 > 0
    _, was_good, gains = seeing
    assert any(good and gain < 0 for good, gain in zip(was_good, gains, strict=True))
