from typing import Any

import pytest

from gateway.telemetry.metrics.slo import Target, mean_interval, missed
from tests.gateway.telemetry.stories import a_sequence, a_trail


def trail(first_token: float | None = 100.030, ended: float | None = 100.070, **targets: Any) -> set[Target]:
    """What it missed; it was queued at 100.004 and has 4 tokens."""
    sequence = a_sequence()
    for name, value in targets.items():
        setattr(sequence, name, value)
    return set(missed(a_trail(sequence=sequence, first_token=first_token, ended=ended)))


def test_without_targets_nothing_is_missed() -> None:
    assert trail() == trail(first_token=None) == set()


@pytest.mark.parametrize(("target", "expected"), [(0.03, set()), (0.02, {Target.TTFT})])
def test_the_first_token_counts_from_the_arrival(target: float, expected: set[Target]) -> None:
    assert trail(first_token_target=target) == expected


@pytest.mark.parametrize(("interval", "expected"), [(0.014, set()), (0.013, {Target.TIME_PER_OUTPUT_TOKEN})])
def test_the_mean_gap_is_held_against_the_interval(interval: float, expected: set[Target]) -> None:
    assert trail(token_interval=interval) == expected


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        ({"first_token_by": 100.04}, set()),
        ({"first_token_by": 100.02}, {Target.DEADLINE}),
        ({"done_by": 100.08}, set()),
        ({"done_by": 100.06}, {Target.DEADLINE}),
    ],
)
def test_deadlines_are_moments(deadline: dict[str, float], expected: set[Target]) -> None:
    assert trail(**deadline) == expected


def test_a_token_that_never_came_is_late() -> None:
    assert trail(first_token=None, first_token_target=60.0, first_token_by=200.0) == {Target.TTFT, Target.DEADLINE}


def test_one_token_has_no_interval() -> None:
    assert mean_interval(a_trail(sequence=a_sequence(output=1))) is None
    assert mean_interval(a_trail()) == pytest.approx(0.04 / 3)
