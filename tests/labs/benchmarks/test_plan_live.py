import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.benchmarks.plan_live import MAX_STEPS, RATE_STEP_SHARE, crossing, knee_of


@given(true=st.floats(0.5, 1.5), width=st.floats(0.001, 0.1))
def test_the_measured_knee_is_where_the_good_share_crosses(true: float, width: float) -> None:
    """A server whose good share falls by a straight line through 99 % at `true` times the planned knee."""
    good = crossing(lambda load: min(1.0, max(0.0, 0.99 - 0.01 * (load - true) / width)))
    reach = RATE_STEP_SHARE * MAX_STEPS
    expected = min(max(true, 1 - reach), 1 + reach)
    assert len(good) <= 1 + MAX_STEPS
    assert knee_of(good) == pytest.approx(expected, abs=RATE_STEP_SHARE)


def test_beyond_the_measured_loads_the_knee_is_the_last_of_them() -> None:
    assert knee_of({0.9: 1.0, 1.0: 0.995}) == 1.0
    assert knee_of({0.9: 0.97, 1.0: 0.9}) == 0.9
    assert knee_of({0.9: 1.0, 1.0: 0.98}) == pytest.approx(0.95)
