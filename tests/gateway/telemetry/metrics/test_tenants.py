import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.metrics.tenants import WINDOW, FairShares, jain_index


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_the_index_lies_between_one_taker_and_equal_shares(shares: list[float]) -> None:
    assert 1 / len(shares) - 1e-9 <= jain_index(shares) <= 1 + 1e-9


def test_the_index_knows_its_ends() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_index([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain_index([0.0, 0.0]) == 1.0


def served(shares: FairShares, rates: dict[str, float], waiting: set[str], ticks: int = WINDOW + 1) -> float:
    for tick in range(ticks):
        shares.tick({name: 100 + tick * rate for name, rate in rates.items()}, waiting)
    return shares.index


def test_service_counts_for_its_weight() -> None:
    weights = {"a": 1.0, "b": 3.0}
    assert served(FairShares(weights.__getitem__), {"a": 1, "b": 3}, {"a", "b"}) == pytest.approx(1)
    assert served(FairShares(weights.__getitem__), {"a": 3, "b": 1}, {"a", "b"}) < 0.7


def test_those_that_got_what_they_asked_for_are_not_compared() -> None:
    assert served(FairShares(lambda _: 1.0), {"a": 1, "b": 100}, {"a"}) == 1.0


def test_nothing_is_said_before_the_window_is_full() -> None:
    shares = FairShares(lambda _: 1.0)
    assert served(shares, {"a": 1, "b": 0}, {"a", "b"}, ticks=WINDOW) == 1.0
    shares.tick({"a": 120, "b": 100}, {"a", "b"})
    assert shares.index == pytest.approx(0.5)
