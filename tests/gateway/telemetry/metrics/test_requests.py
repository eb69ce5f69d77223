from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.metrics.requests import (
    MOST_CLIENTS,
    MOST_EACH,
    LatencyTarget,
    RetryMemory,
    mean_interval,
    missed,
)
from tests.gateway.telemetry.records import a_sequence, a_timeline


def test_a_client_is_known_to_keep_to_what_it_was_told_or_not() -> None:
    memory = RetryMemory()
    memory.told("k", 0, due=10.0)
    memory.told("k", 0, due=20.0)
    assert memory.came("k", 1, 12.0) is True
    assert memory.came("k", 1, 13.0) is False
    assert memory.came("k", 1, 14.0) is None, "both have come back"


def test_attempts_of_other_keys_and_other_numbers_are_others() -> None:
    memory = RetryMemory()
    memory.told("k", 1, due=10.0)
    assert memory.came("other", 2, 11.0) is None
    assert memory.came("k", 1, 11.0) is None
    assert memory.came("k", 2, 11.0) is True


def test_of_several_it_is_the_one_that_was_due_last() -> None:
    memory = RetryMemory()
    for due in (10.0, 20.0, 30.0):
        memory.told("k", 0, due)
    assert memory.came("k", 1, 25.0) is True
    assert memory.came("k", 1, 15.0) is True
    assert memory.came("k", 1, 25.0) is False


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 100)), max_size=300))
def test_it_is_bounded(told: list[tuple[int, float]]) -> None:
    memory = RetryMemory()
    for number, due in told:
        memory.told("one", 0, due)
        memory.told(str(number), 0, due)
    assert len(memory._due) <= MOST_CLIENTS
    assert all(len(moments) <= MOST_EACH for moments in memory._due.values())


def test_whoever_was_told_longest_ago_is_forgotten() -> None:
    memory = RetryMemory()
    for number in range(MOST_CLIENTS + 1):
        memory.told(str(number), 0, 0.0)
    assert memory.came("0", 1, 1.0) is None
    assert memory.came("1", 1, 1.0) is True


def timeline(first_token: float | None = 100.030, ended: float | None = 100.070, **targets: Any) -> set[LatencyTarget]:
    """What it missed; it was queued at 100.004 and has 4 tokens."""
    sequence = a_sequence()
    for name, value in targets.items():
        setattr(sequence, name, value)
    return set(missed(a_timeline(sequence=sequence, first_token=first_token, ended=ended)))


def test_without_targets_nothing_is_missed() -> None:
    assert timeline() == timeline(first_token=None) == set()


@pytest.mark.parametrize(("target", "expected"), [(0.03, set()), (0.02, {LatencyTarget.TTFT})])
def test_the_first_token_counts_from_the_arrival(target: float, expected: set[LatencyTarget]) -> None:
    assert timeline(first_token_target=target) == expected


@pytest.mark.parametrize(("interval", "expected"), [(0.014, set()), (0.013, {LatencyTarget.TIME_PER_OUTPUT_TOKEN})])
def test_the_mean_gap_is_held_against_the_interval(interval: float, expected: set[LatencyTarget]) -> None:
    assert timeline(token_interval=interval) == expected


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        ({"first_token_by": 100.04}, set()),
        ({"first_token_by": 100.02}, {LatencyTarget.DEADLINE}),
        ({"done_by": 100.08}, set()),
        ({"done_by": 100.06}, {LatencyTarget.DEADLINE}),
    ],
)
def test_deadlines_are_moments(deadline: dict[str, float], expected: set[LatencyTarget]) -> None:
    assert timeline(**deadline) == expected


def test_a_token_that_never_came_is_late() -> None:
    assert timeline(first_token=None, first_token_target=60.0, first_token_by=200.0) == {
        LatencyTarget.TTFT,
        LatencyTarget.DEADLINE,
    }


def test_one_token_has_no_interval() -> None:
    assert mean_interval(a_timeline(sequence=a_sequence(output=1))) is None
    assert mean_interval(a_timeline()) == pytest.approx(0.04 / 3)
