from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.simulation.statistics import (
    MOST_INTERVALS,
    QuantileHistogram,
    ServiceGap,
    Timeline,
    quantile,
)


@given(st.lists(st.floats(1e-4, 1e4), min_size=1), st.floats(0.01, 1))
def test_a_histogram_knows_quantiles_to_one_percent(values: list[float], share: float) -> None:
    histogram = QuantileHistogram()
    for value in values:
        histogram.add(value)
    exact = quantile(sorted(values), share)
    assert exact == sorted(values)[max(0, ceil(share * len(values)) - 1)]
    assert histogram.quantiles([share])[0] == pytest.approx(exact, rel=0.0101)


def test_a_gap_counts_only_what_drew_apart_while_both_waited() -> None:
    gap = ServiceGap()
    gap.observe([0.0, 0.0], [True, False])
    gap.observe([100.0, 0.0], [True, True])  # 100 apart already: not a fault of this interval
    gap.observe([105.0, 20.0], [True, True])
    assert gap.largest == 15.0
    gap.observe([500.0, 20.0], [True, False])
    gap.observe([500.0, 30.0], [True, True])
    gap.observe([503.0, 30.0], [True, True])
    assert gap.largest == 15.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 100)), min_size=1))
def test_a_timeline_keeps_the_largest_value_in_bounded_memory(samples: list[tuple[float, float]]) -> None:
    timeline = Timeline()
    for time, value in sorted(samples):
        timeline.add(time, value)
    assert len(timeline.values) <= MOST_INTERVALS
    assert max(timeline.values) == max(value for _, value in samples)
    assert (len(timeline.values) - 1) * timeline.interval <= max(time for time, _ in samples)
