"""The forecast agrees with what the store would decide on the same figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quotas.errors import BudgetSpent, LimitExceeded, NeverFits, QuotaRefused, refusals
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import Ask, LimitState
from quotas.store.account import Levels, QuotaAccount
from tests.quotas.clocked_tenant import SPENT

NOW = 1_795_000_000_500_000  # us
AMOUNTS = st.integers(1, 1000)
RATES = st.builds(
    lambda resource, amount, seconds, burst: Limit(resource, amount, Rate(seconds, burst)),
    st.sampled_from(SPENT),
    AMOUNTS,
    st.sampled_from([1, 60, 3600]),
    AMOUNTS,
)
BUDGETS = st.builds(
    lambda resource, amount, period: Limit(resource, amount, Budget(period)),
    st.sampled_from(SPENT),
    AMOUNTS,
    st.sampled_from(BudgetPeriod),
)
HELD = st.builds(lambda amount: Limit(Resource.CONCURRENT_REQUESTS, amount), st.integers(0, 10))
ASKS = st.builds(Ask, st.just(1), st.integers(0, 1200), st.integers(0, 1200))


def capacity(account: QuotaAccount, index: int) -> int:
    return account.limits[index].capacity * account.scales[index]


@given(st.one_of(RATES, BUDGETS, HELD), ASKS, st.floats(0, 1))
def test_it_says_what_the_store_would_say_of_one_limit(limit: Limit, ask: Ask, part: float) -> None:
    account = QuotaAccount("acme", None, (limit,), "0", 30.0)
    figures = Levels.at(NOW, b"", (round(part * capacity(account, 0)), 0))
    told = refusals(account.states(figures), ask, NOW / 1e6)
    if not told:
        account.refuse_unfit(ask)
        assert ask.of(limit) * account.scales[0] <= capacity(account, 0) - figures.numbers[0]
        return
    (refusal,) = told
    try:
        account.refuse_unfit(ask)
        expected = account.refusal(ask, figures)
    except NeverFits as never:
        expected = never
    assert (type(refusal), refusal.limit, refusal.asked) == (type(expected), expected.limit, expected.asked)
    assert refusal.left == expected.left
    assert when(refusal) == pytest.approx(when(expected), abs=1e-6)


def when(refusal: QuotaRefused) -> float | None:
    """Seconds; None: not known."""
    match refusal:
        case BudgetSpent(resets_at=moment):
            return moment
        case LimitExceeded(retry_after=wait):
            return wait
    return None


def test_every_limit_that_refuses_is_told() -> None:
    rate, held = Limit(Resource.TOKENS, 60, Rate(60, 100)), Limit(Resource.CONCURRENT_REQUESTS, 2)
    states = [LimitState(rate, 20, 80.0), LimitState(held, 0, 0.0)]
    assert [str(one) for one in refusals(states, Ask(1, 30, 20), 0.0)] == [
        "tokens/min is 60: asked 50, left 20; it suffices in 30 s",
        "concurrent_requests is 2: asked 1, left 0; it suffices when others end",
    ]
    assert refusals(states[:1], Ask(1, 10, 10), 0.0) == []
