from hypothesis import given
from hypothesis import strategies as st

from labs.simulation.svg import linear_ticks, log_ticks


@given(st.floats(1e-6, 1e9))
def test_linear_ticks_are_few_and_reach_the_end(high: float) -> None:
    ticks = linear_ticks(high)
    assert ticks[0] == 0 and 2 <= len(ticks) <= 6 and ticks[-1] >= high * (1 - 1e-9)


@given(st.floats(1e-5, 1e4), st.floats(1.0001, 1e6))
def test_log_ticks_lie_within_the_axis(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert 1 <= len(ticks) <= 13 and all(low * (1 - 1e-9) <= tick <= low * factor for tick in ticks)
