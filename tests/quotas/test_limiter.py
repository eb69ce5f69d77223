"""The forecast agrees with what the store would decide on the same figures."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quotas.errors import BudgetSpent, LimitExceeded, NeverFits, QuotaRefused
from quotas.limiter import Charge, Limiter, refusals
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import Ask, LimitState, Reservation, Usage
from quotas.store.account import Levels, QuotaAccount
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.clocked_tenant import SPENT, ClockedTenant, Policy, Steps
from tests.quotas.store.test_replica import KEYS, START, asks, policies, waits

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
        assert ask.of(limit.resource) * account.scales[0] <= capacity(account, 0) - figures.numbers[0]
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


FOREVER = 1e8  # seconds of lease: nobody dies here
NEAR = {"rel": 1e-9, "abs": 1e-6}

steps = st.one_of(
    st.tuples(st.just("reserve"), st.sampled_from(KEYS), asks),
    st.tuples(st.just("reserve"), st.sampled_from(KEYS), asks),
    st.tuples(st.just("extend"), st.integers(0, 20), st.integers(1, 70)),
    st.tuples(st.just("settle"), st.integers(0, 20), st.integers(0, 14), st.integers(0, 80)),
    st.tuples(st.just("wait"), waits),
)


class Twins(ClockedTenant):
    """A store and a limiter that are told the same."""

    def __init__(self, runner: ScriptRunner, policy: Policy) -> None:
        super().__init__(runner, policy, START)
        self.store, self.limiter = RedisStore(runner, FOREVER), Limiter()
        self.held: list[tuple[Reservation, Charge]] = []

    async def live(self, steps: Steps) -> None:
        for step in steps:
            await super().live([step])
            await self.check()

    async def reserve(self, key: str | None, ask: Ask) -> None:
        limits = self.limits_of(key)
        refusal, taken = refused(lambda: self.limiter.reserve(self.tenant, limits, ask, self.seconds))
        try:
            reservation = await self.store.reserve(self.tenant, key, limits, ask)
        except QuotaRefused as error:
            assert_same(refusal, error)
        else:
            assert taken is not None, f"refused here alone: {refusal}"
            self.held.append((reservation, taken))

    async def extend(self, index: int, output: int) -> None:
        if not self.held:
            return
        reservation, taken = self.held[index % len(self.held)]
        refusal, _ = refused(lambda: self.limiter.extend(taken, output, self.seconds))
        try:
            await self.store.extend(reservation, output)
        except QuotaRefused as error:
            assert_same(refusal, error)
        else:
            assert refusal is None

    async def settle(self, index: int, input_tokens: int, output_tokens: int) -> None:
        if not self.held:
            return
        reservation, taken = self.held.pop(index % len(self.held))
        usage = Usage(input_tokens, output_tokens, requests=1 if input_tokens else 0)
        await self.store.settle(reservation, usage)
        self.limiter.settle(taken, usage)
        self.limiter.settle(taken, Usage())

    async def check(self) -> None:
        for key in KEYS:
            limits = self.limits_of(key)
            theirs = await self.store.states(self.tenant, key, limits)
            for own, other in zip(self.limiter.states(self.tenant, limits, self.seconds), theirs, strict=True):
                assert own == LimitState(other.limit, other.remaining, pytest.approx(other.reset, **NEAR))

    @property
    def seconds(self) -> float:
        return self.now / 1e6


def refused(call):  # type: ignore[no-untyped-def]
    try:
        return None, call()
    except QuotaRefused as refusal:
        return refusal, None


def assert_same(own: QuotaRefused | None, other: QuotaRefused) -> None:
    """Of two limits with the same wait, either may be named."""
    assert type(own) is type(other), (own, other)
    assert (when(own) or 0.0) == pytest.approx(when(other) or 0.0, **NEAR)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(policy=policies, steps=st.lists(steps, min_size=10, max_size=40))
def test_it_decides_as_the_store_does(
    loop_and_runner: tuple[asyncio.Runner, ScriptRunner], policy: Policy, steps: Steps
) -> None:
    loop, runner = loop_and_runner
    loop.run(Twins(runner, policy).live(steps))


def test_admitted_work_never_exceeds_burst_and_rate() -> None:
    limiter, limits = Limiter(), (Limit(Resource.REQUESTS, 10, Rate(1, 4)),)
    admitted = 0
    for tick in range(1000):
        result, _ = refused(lambda tick=tick: limiter.reserve("acme", limits, Ask(1), 1e9 + tick / 100))
        admitted += result is None
    assert admitted == 4 + 99  # 10 seconds at 10 a second, less the last hundredth


def test_tenants_have_levels_of_their_own_and_share_nothing() -> None:
    limiter, limits = Limiter(), (Limit(Resource.CONCURRENT_REQUESTS, 1),)
    limiter.reserve("acme", limits, Ask(1), 0.0)
    limiter.reserve("globex", limits, Ask(1), 0.0)
    with pytest.raises(LimitExceeded):
        limiter.reserve("acme", limits, Ask(1), 0.0)
