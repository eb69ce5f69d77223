from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.output_length import LENGTHS_REMEMBERED, OutputLengths

MOST = 1000


@given(st.lists(st.integers(1, MOST), min_size=8, max_size=2 * LENGTHS_REMEMBERED), st.integers(0, MOST))
def test_forecasts_are_those_of_the_recent_lengths_beyond_what_is_generated(values: list[int], generated: int) -> None:
    lengths = OutputLengths()
    for value in values:
        lengths.observe("a", MOST, value)
    recent = values[-LENGTHS_REMEMBERED:]
    rest = [value for value in recent if value > generated] if generated else recent
    expected = mean(rest) if rest else (generated + MOST) / 2
    assert lengths.mean("a", MOST, generated) == pytest.approx(expected)
    _, deviation = lengths.forecast("a", MOST, generated)
    assert deviation == pytest.approx(min(pstdev(recent), MOST - expected), abs=1e-6)
    assert lengths.quantile("a", MOST, 0.9, generated) in (rest or [MOST])


def test_a_tenant_without_a_history_is_told_of_everybodys() -> None:
    lengths = OutputLengths()
    assert lengths.mean("new", MOST) == MOST / 2
    for _ in range(8):
        lengths.observe("old", MOST, 40)
    assert lengths.mean("new", MOST) == 40
    assert lengths.mean("new", 8 * MOST) == 4 * MOST, "another bound is another kind"
