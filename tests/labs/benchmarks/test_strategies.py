"""Strategies are played out, and gains are those over an honest tenant in the same place."""

import pytest

from labs.benchmarks.report import Report, Spread
from labs.benchmarks.strategies import (
    HONEST,
    STRATEGIES,
    STRATEGIST,
    Gains,
    Strategy,
    _arrivals,
    _true_seconds,
    show_strategies,
)
from labs.benchmarks.true_costs import DOCUMENTS


def test_each_strategy_has_a_name_of_its_own() -> None:
    assert len({strategy.name for strategy in STRATEGIES}) == len(STRATEGIES)


def test_what_a_tenant_catches_up_with_is_no_lasting_gain() -> None:
    caught_up = Gains.of(own=(10.0, 20.0, 60.0), honest=(20.0, 30.0, 60.0))
    assert caught_up == pytest.approx((0.5, 4 / 3, 1.0))
    ahead_before = Gains.of(own=(30.0, 40.0, 73.0), honest=(20.0, 30.0, 60.0))
    assert ahead_before == pytest.approx((1.5, 1.1, 1.1)), "its lead of the first seconds is judged by itself"


@pytest.mark.nightly
def test_honesty_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labs.benchmarks.strategies.STRATEGIES", (Strategy("honest"), Strategy("early", first_by=2.0)))
    report = Report("strategies")
    show_strategies(report, (1,), 30.0)
    ((honest, early),) = report.tables.values()
    assert isinstance(honest["gain"], Spread) and abs(honest["gain"].median) < 0.03
    assert early["gain"] == Spread(0.0, 0.0, 0.0, 1)


def test_the_strategist_asks_as_it_does_and_the_others_honestly() -> None:
    strategy = Strategy("x", DOCUMENTS, lambda a: a._replace(deadline=2.0), times=3.0, beside=DOCUMENTS, first_by=1.0)
    arrivals = _arrivals(strategy, 1, 60.0)
    mine = [arrival for arrival in arrivals if arrival.tenant == STRATEGIST]
    others = [arrival for arrival in arrivals if arrival.tenant != STRATEGIST]
    assert len(mine) == pytest.approx(len(others), rel=0.3)
    assert {arrival.deadline for arrival in mine} == {2.0} and {arrival.deadline for arrival in others} == {None}
    assert others[0].time > 1.0 > mine[0].time


def test_a_time_for_last_tokens_that_can_be_met_costs_no_share() -> None:
    """Early estimates were too long; refused for them, the tenant had no admission to correct them."""
    found = _true_seconds(Strategy("x", change=lambda a: a._replace(done_within=10.0), times=2.0), 101, 30.0)
    assert found[STRATEGIST] > 0.9 * found[HONEST[0]]


def test_a_tenant_that_leaves_after_first_tokens_pays_for_prompts_only() -> None:
    stays, leaves = (
        _true_seconds(Strategy("x", DOCUMENTS, leaves_after=tokens, beside=DOCUMENTS), 1, 20.0)[STRATEGIST]
        for tokens in (1000.0, 1.0)
    )
    assert 0.5 * stays < leaves < 1.5 * stays
