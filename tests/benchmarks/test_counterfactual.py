"""What would have become of the refused: found out in another world, without a trace in this one."""

import os

import pytest

from admission.simulation.arrival import Arrival
from tests.benchmarks.forked_worlds import apart, look_into

DEADLINE = "order=fair,overload=deadline"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the world is forked by the operating system")


def test_whoever_was_refused_for_less_patience_than_the_objective_has_would_have_been_good() -> None:
    arrivals = [Arrival(0.0, 6000, 10, tenant="a"), Arrival(0.1, 100, 10, tenant="b", deadline=0.01)]
    assert apart(look_into, DEADLINE, arrivals, 1) == (["1 refused", "0 good"], 1, 1)


def test_whoever_was_refused_behind_minutes_of_work_would_not() -> None:
    flood = [Arrival(n / 100, 8000, 10, tenant="a", deadline=2.0) for n in range(40)]
    outcomes, looked, good = apart(look_into, DEADLINE, flood, 1)
    assert looked == sum(outcome.endswith("refused") for outcome in outcomes) > 30
    assert good == 0


def test_looking_changes_nothing_in_the_run_itself() -> None:
    arrivals = [Arrival(n / 12, 600 + 100 * (n % 9), 20 + n % 50, tenant=f"{n % 3}", deadline=2.0) for n in range(300)]
    blind, seeing = (apart(look_into, DEADLINE, arrivals, every) for every in (0, 5))
    refused = sum(outcome.endswith("refused") for outcome in blind[0])
    assert blind[0] == seeing[0]
    assert blind[1] == 0 and seeing[1] == refused // 5 > 0
