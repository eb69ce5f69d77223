from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.series import HISTORY_SECONDS, NUMBERS, Gauges, RecentSeries, median_and_p99
from tests.gateway.admin.clock import Clock

Tick = Callable[..., None]


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def series(clock: Clock) -> RecentSeries:
    return RecentSeries(clock)


@pytest.fixture
def tick(series: RecentSeries, clock: Clock) -> Tick:
    """Sets the clock, and tells the series what is so then."""

    def tick(now: float, gauges: Gauges | None = None) -> None:
        clock.now = now
        series.tick(gauges or Gauges())

    return tick


def points(series: RecentSeries) -> dict[str, Any]:
    seconds: dict[str, Any] = series.to_json(1.8e9, [])["points"]
    return seconds


def last(series: RecentSeries, name: str) -> Any:
    return points(series)[name][-1]


def test_before_anything_happened_every_second_is_unknown(series: RecentSeries) -> None:
    shown = points(series)
    for name in NUMBERS:
        assert shown[name] == [None] * HISTORY_SECONDS
    assert shown["waiting"] == {}


def test_events_of_a_second_are_told_when_it_is_over(series: RecentSeries, tick: Tick) -> None:
    series.request_ended(False)
    series.request_ended(True)
    series.first_token(0.2)
    tick(100.9)
    assert last(series, "requests") is None
    tick(101.0, Gauges(running=3, kv_blocks_used=7))
    names = ("requests", "refused", "ttft_p50", "running", "kv_blocks_used")
    assert [last(series, name) for name in names] == [2, 1, 0.2, 3, 7]
    tick(102.0)
    assert last(series, "requests") == 0


def test_percentiles_are_of_the_last_ten_seconds_so_that_few_requests_tell_them_apart(
    series: RecentSeries, tick: Tick
) -> None:
    shown = []
    for second, seconds in enumerate([0.1, 0.2, 0.3, *[None] * 10]):
        if seconds is not None:
            series.first_token(seconds)
        series.step(0.01, 0.01 * (1 + second), 1)
        tick(101.0 + second)
        shown.append((last(series, "ttft_p50"), last(series, "ttft_p99")))
    assert shown[:4] == [(0.1, 0.1), (0.1, 0.2), (0.2, 0.3), (0.2, 0.3)]
    assert shown[9:] == [(0.2, 0.3), (0.2, 0.3), (0.3, 0.3), (None, None)]
    assert (last(series, "gap_p50"), last(series, "gap_p99")) == pytest.approx((0.08, 0.13))


def test_pending_waits_count_in_the_time_to_first_token(series: RecentSeries, tick: Tick) -> None:
    for seconds in (0.1, 0.1, 0.1):
        series.first_token(seconds)
    tick(101.0, Gauges(waits=[0.01, 31.0]))
    names = ("ttft_p50", "ttft_p99", "oldest_wait")
    assert [last(series, name) for name in names] == [0.1, 31.0, 31.0]  # a newcomer makes nothing look faster
    tick(120.0, Gauges(waits=[20.0, 50.0, 21.0]))  # and nobody got a first token
    assert [last(series, name) for name in names] == [21.0, 50.0, 50.0]
    assert series.oldest_wait == 50.0
    tick(121.0)
    assert [last(series, name) for name in names] == [None, None, 0.0]


def test_a_long_stop_leaves_no_samples_of_before(series: RecentSeries, tick: Tick) -> None:
    series.first_token(0.1)
    tick(101.0)
    tick(1e6)
    assert last(series, "ttft_p50") is None


def test_tokens_are_the_growth_of_totals(series: RecentSeries, tick: Tick) -> None:
    for second, total in ((101.0, 10), (102.0, 25), (103.0, 25)):
        tick(second, Gauges(prompt_tokens=total, output_tokens=2 * total))
    assert points(series)["prompt_tokens"][-3:] == [10, 15, 0]
    assert points(series)["output_tokens"][-3:] == [20, 30, 0]


def test_seconds_without_a_reading_are_unknown(series: RecentSeries, tick: Tick) -> None:
    tick(101.0)
    series.request_ended(False)
    tick(104.5)
    assert points(series)["requests"][-4:] == [0, None, None, 1]


def test_a_long_stop_leaves_nothing_of_before(series: RecentSeries, tick: Tick) -> None:
    tick(101.0, Gauges(running=1))
    tick(1e6, Gauges(running=2))
    assert points(series)["running"] == [None] * (HISTORY_SECONDS - 1) + [2]


def test_gaps_count_for_each_sequence_that_had_them(series: RecentSeries, tick: Tick) -> None:
    series.step(0.01, 0.01, 99)
    series.step(0.3, 0.3, 1)
    series.step(0.5, 0.5, 0)
    tick(101.0)
    assert (last(series, "gap_p50"), last(series, "gap_p99")) == (0.01, 0.01)


def test_load_is_the_share_of_the_last_ten_seconds(series: RecentSeries, tick: Tick) -> None:
    for second in range(10):
        series.step(0.5 if second < 5 else 0.0, 0.5, 1)
        tick(101.0 + second)
    assert series.busy == pytest.approx(0.25)


def test_a_device_is_never_busier_than_all_the_time(series: RecentSeries, tick: Tick) -> None:
    for second in range(10):
        series.step(1.7, 1.7, 1)
        tick(101.0 + second)
    assert series.busy == 1.0


def test_every_class_has_a_line_even_if_nothing_ever_waited_in_it(series: RecentSeries, tick: Tick) -> None:
    tick(101.0, Gauges(waiting={"batch": 4}))
    shown = series.to_json(1.8e9, ["fast", "usual"])["points"]["waiting"]
    assert list(shown) == ["fast", "usual", "batch"]
    assert (shown["fast"][-2:], shown["batch"][-2:]) == ([None, 0], [None, 4])


def test_the_end_of_the_series_is_told_in_unix_seconds(series: RecentSeries) -> None:
    assert series.to_json(1.8e9 + 0.7, [])["end"] == 1_800_000_000


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=1, max_size=50))
def test_quantiles_equal_the_quantiles_of_the_samples_written_out(samples: list[tuple[float, int]]) -> None:
    written = sorted(value for value, times in samples for _ in range(times))
    median, p99 = median_and_p99(samples)
    assert median == written[-(-len(written) // 2) - 1]
    assert p99 == written[-(-99 * len(written) // 100) - 1]
