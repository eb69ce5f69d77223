"""The limiter decides as the store does."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labs.what_if.limiter import Charge, Limiter
from quotas.errors import QuotaRefused
from quotas.reservation import Ask, LimitState, Reservation, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.clocked_tenant import ClockedTenant, Policy, Steps
from tests.quotas.store.test_replica import KEYS, START, asks, policies, waits
from tests.quotas.test_errors import when

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
        limits, tenant = self.limits_of(key), self.tenant_of(key)
        refusal, taken = refused(lambda: self.limiter.reserve(tenant, limits, ask, self.seconds))
        try:
            reservation = await self.store.reserve(tenant, key, limits, ask)
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
        reasoning = output_tokens // 2
        usage = Usage(input_tokens, output_tokens, requests=1 if input_tokens else 0, reasoning_tokens=reasoning)
        await self.store.settle(reservation, usage)
        self.limiter.settle(taken, usage)
        self.limiter.settle(taken, Usage())

    async def check(self) -> None:
        for key in KEYS:
            limits, tenant = self.limits_of(key), self.tenant_of(key)
            theirs = await self.store.states(tenant, key, limits)
            for own, other in zip(self.limiter.states(tenant, limits, self.seconds), theirs, strict=True):
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
async def test_it_decides_as_the_store_does(runner: ScriptRunner, policy: Policy, steps: Steps) -> None:
    await Twins(runner, policy).live(steps)
