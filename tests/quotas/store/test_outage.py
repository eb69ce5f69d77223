import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis

from quotas.errors import BudgetSpent, StoreUnavailable
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.quotas import Quotas
from quotas.reservation import Ask, Reservation, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.servers import connected, hanging, opened
from tests.quotas.stores import usage_by_key
from tests.quotas.wire import Wire

HOURLY = Limit(Resource.TOKENS, 10_000, Rate(3600, 10_000))
DAILY = Limit(Resource.TOKENS, 100_000, Budget(BudgetPeriod.DAY))
CONCURRENT = Limit(Resource.CONCURRENT_REQUESTS, 100)
OF_KEY = Limit(Resource.TOKENS, 5_000, Budget(BudgetPeriod.DAY), key="k1")
LIMITS = (HOURLY, DAILY, CONCURRENT, OF_KEY)
ASK = Ask(1, 60, 40)  # 5 % of the smallest limit are two and a half


@pytest.fixture
async def store(url: str) -> AsyncIterator[RedisStore]:
    async with connected(url) as store:
        yield store


async def returned(store: RedisStore) -> None:
    await store.returned.wait()
    await store.heartbeat()


async def reserve(store: RedisStore, policy: str = "lease", ask: Ask = ASK) -> Reservation:
    store.returned.clear()
    return await store.reserve("acme", "k1", LIMITS, ask, policy)  # type: ignore[arg-type]


async def left(store: RedisStore) -> dict[str, int]:
    return {state.limit.name: state.remaining for state in await store.states("acme", "k1", LIMITS)}


async def warmed_up(store: RedisStore) -> None:
    """The tenant has been served, and has a slice."""
    await store.settle(await reserve(store), Usage(60, 40))
    await store.heartbeat()


async def test_a_tenant_that_is_open_runs_uncounted_and_is_charged_on_return(url: str, store: RedisStore) -> None:
    await warmed_up(store)
    async with hanging(url):
        ended = [await reserve(store, "open", Ask(1, 2000, 2000)) for _ in range(2)]
        going_on = await reserve(store, "open", Ask(1, 1000, 500))
        for reservation in ended:
            await store.settle(reservation, Usage(2000, 1500))
    await returned(store)
    assert (await left(store))["tokens/day"] == 100_000 - 100 - 2 * 3500 - 1500
    assert (await left(store))["key:k1:tokens/day"] == 0, "more than it held"
    assert (await left(store))["concurrent_requests"] == 99
    await store.settle(going_on, Usage(1000, 100))
    assert (await left(store))["tokens/day"] == 100_000 - 100 - 2 * 3500 - 1100
    booked = await usage_by_key(store, "acme", datetime.now(UTC).date())
    assert booked == {"k1": Usage(60 + 2 * 2000 + 1000, 40 + 2 * 1500 + 100, requests=4)}


async def test_a_slice_is_spent_all_or_nothing_and_reconciled(url: str, store: RedisStore) -> None:
    await warmed_up(store)
    async with hanging(url):
        spent = [await reserve(store) for _ in range(2)]
        with pytest.raises(StoreUnavailable):
            await reserve(store)
        await store.settle(spent[0], Usage(60, 0))
        again = await reserve(store, ask=Ask(1, 40, 40))
        with pytest.raises(StoreUnavailable):
            await reserve(store)
        await store.settle(again, Usage(40, 40))
    await returned(store)
    assert (await left(store))["key:k1:tokens/day"] == 5000 - 100 - 60 - 80 - 100
    assert (await left(store))["concurrent_requests"] == 99
    await store.settle(spent[1], Usage(60, 40))
    remaining = await left(store)
    assert (remaining["tokens/day"], remaining["key:k1:tokens/day"]) == (99_660, 4660)
    assert remaining["concurrent_requests"] == 100


async def test_a_tenant_without_a_slice_is_refused(url: str, store: RedisStore) -> None:
    async with hanging(url):
        with pytest.raises(StoreUnavailable, match="slice is too small"):
            await reserve(store)


async def test_a_slice_ends_by_the_replicas_own_clock(url: str) -> None:
    now = 1000.0
    store = RedisStore(ScriptRunner(url, 0.5), 30.0, lambda: now)
    await store.connect()
    await warmed_up(store)
    async with hanging(url):
        await reserve(store)
        now += 27.5
        with pytest.raises(StoreUnavailable):
            await reserve(store)
    await store.close()


async def test_after_an_outage_a_slice_is_as_large_as_the_demand_in_it(url: str) -> None:
    limits, now = (Limit(Resource.REQUESTS, 100_000, Budget(BudgetPeriod.DAY)),), 1000.0
    store = RedisStore(ScriptRunner(url, 0.25), 6.0, lambda: now)
    await store.connect()

    async def seconds(number: int) -> None:
        """Let ten requests a second come, with a heartbeat behind each second."""
        nonlocal now
        for _ in range(number):
            for _ in range(10):
                await store.settle(await store.reserve("acme", None, limits, Ask(), "lease"), Usage())
            now += 1.0
            with suppress(StoreUnavailable):
                await store.heartbeat()

    await seconds(6)
    store.returned.clear()
    async with hanging(url):
        await seconds(4)
    await returned(store)
    assert store.set_aside()["requests"] >= 50, "of the 60 that come in a lease"
    await store.close()


async def test_nothing_is_set_aside_for_what_the_store_took_over_though_it_could_not_be_settled_then(
    url: str, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warmed_up(store)
    async with hanging(url):
        reservation = await reserve(store)
    replica, lost = store._replica, StoreUnavailable("lost")
    with monkeypatch.context() as patched:
        patched.setattr(replica, "_put_back", AsyncMock(side_effect=lost))
        with pytest.raises(StoreUnavailable):
            await returned(store)
        await store.settle(reservation, Usage(60, 10))  # perhaps the store has it by now
    with monkeypatch.context() as patched:
        patched.setattr(replica, "_settled", AsyncMock(side_effect=lost))
        with pytest.raises(StoreUnavailable):
            await store.heartbeat()
    assert not store._fallback._locals
    await store.heartbeat()
    assert (await left(store))["tokens/day"] == 100_000 - 100 - 70


async def test_an_answer_goes_on_within_the_slice(url: str, store: RedisStore) -> None:
    await warmed_up(store)
    before = await reserve(store)
    async with hanging(url):
        await store.extend(before, 100)
        with pytest.raises(StoreUnavailable):
            await store.extend(before, 1000)
    await returned(store)
    await store.extend(before, 50)
    before.progress = Usage(60, 170)
    await store.heartbeat()
    await store.settle(before, Usage(60, 180, reasoning_tokens=175))
    assert (await left(store))["tokens/day"] == 100_000 - 100 - 240
    booked = await usage_by_key(store, "acme", datetime.now(UTC).date())
    assert booked == {"k1": Usage(120, 220, requests=2, reasoning_tokens=175)}


async def test_slices_give_way_to_requests_that_need_them(url: str) -> None:
    limits = (Limit(Resource.REQUESTS, 100, Budget(BudgetPeriod.DAY)),)

    async def served(by: RedisStore) -> int:
        for count in range(100):
            try:
                await by.reserve("acme", None, limits, Ask(), "lease")
            except BudgetSpent:
                return count
        return 100

    async with connected(url) as store, connected(url) as other:
        for _ in range(2):
            await store.reserve("acme", None, limits, Ask(), "lease")
            await other.reserve("acme", None, limits, Ask(), "lease")
            await asyncio.gather(store.heartbeat(), other.heartbeat())
        first = await served(store)
        assert 90 <= first <= 95, "its own slice gave way, the other replica's did not"
        await other.heartbeat()
        assert first + await served(store) == 95, "with the next heartbeat it keeps no more than one request needs"


async def test_a_closing_replica_leaves_nothing_set_aside(url: str, store: RedisStore) -> None:
    async with connected(url) as other:
        await warmed_up(other)
    async with Redis.from_url(url) as redis:
        assert not [name for name in await redis.hkeys("sluice:{acme}") if name.startswith(b"s:")]


async def test_a_store_that_lost_its_state_in_the_outage_is_told_what_was_spent(url: str, store: RedisStore) -> None:
    await warmed_up(store)
    async with hanging(url):
        ended, going_on = await reserve(store), await reserve(store)
        await store.settle(ended, Usage(60, 40))
    await store.returned.wait()
    async with Redis.from_url(url) as redis:
        await redis.flushall()
    await store.heartbeat()
    assert (await left(store))["tokens/day"] == 100_000 - 300
    await store.settle(going_on, Usage(60, 0))
    assert (await left(store))["tokens/day"] == 100_000 - 260


@pytest.mark.parametrize("lost", range(1, 9))
async def test_requests_of_an_outage_are_charged_once_however_many_answers_are_lost(url: str, lost: int) -> None:
    runner = ScriptRunner(url, 5)
    await runner.client.connect()
    wire = Wire(runner)
    store = RedisStore(wire)
    await warmed_up(store)
    wire.is_cut = True
    ended, going_on = await reserve(store), await reserve(store)
    await store.settle(ended, Usage(60, 30))
    wire.is_cut, wire.losses = False, lost
    while wire.losses:
        with pytest.raises(StoreUnavailable):
            await store.heartbeat()
    await store.settle(going_on, Usage(60, 20))
    await store.heartbeat()
    assert (await left(store))["tokens/day"] == 100_000 - 100 - 90 - 80
    assert (await usage_by_key(store, "acme", datetime.now(UTC).date()))["k1"] == Usage(180, 90, requests=3)
    await store.close()


async def test_closing_waits_for_the_store_no_longer_than_its_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quotas.quotas.SETTLE_SECONDS", 0.2)
    store = opened(url)
    await store.connect()
    quotas = Quotas(store, 3600)
    reservation = await reserve(store)
    async with hanging(url):
        await store.settle(reservation, Usage(60, 40))
        await quotas.close()
    assert not store.is_connected


async def test_closing_settles_with_a_store_that_comes_back(url: str) -> None:
    store = opened(url)
    await store.connect()
    quotas = Quotas(store, 3600)
    reservation = await reserve(store)
    async with hanging(url):
        await store.settle(reservation, Usage(60, 10))
        closing = asyncio.create_task(quotas.close())
        await asyncio.sleep(0)
    await closing
    async with connected(url) as observer:
        assert (await left(observer))["tokens/day"] == 99_930
