"""The drain is measured while something waits, and told by its slow periods."""

import pytest

from admission.drain import UNMEASURED, DrainMeter


def drained(rates: list[float]) -> DrainMeter:
    """A queue that never runs empty and drains at these rates, a second each."""
    meter, now = DrainMeter(), 0.0
    meter.look(True, now)
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
        meter.look(True, second)
        meter.left(0.01, False, second + 0.9)
    assert meter.slow_rate == UNMEASURED


def test_a_machine_that_stands_still_has_a_rate_above_nothing() -> None:
    assert drained([0.0] * 30).slow_rate > 0
