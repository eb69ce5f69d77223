"""What no limit counted is booked all the same, once."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from quotas.errors import StoreUnavailable
from quotas.reservation import Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.wire import Wire

USAGE = Usage(100, 50, 30, 1e9)


@pytest.fixture
async def wire(store_url: str) -> AsyncIterator[Wire]:
    runner = ScriptRunner(store_url, timeout=5)
    await runner.client.connect()
    yield Wire(runner)
    await runner.client.close()


async def booked(store: RedisStore, tenant: str) -> dict[str | None, Usage]:
    return await store.usage(tenant, datetime.now(UTC).date())


async def test_it_is_booked_by_key_with_the_next_heartbeat(wire: Wire, tenant: str) -> None:
    store = RedisStore(wire)
    for key in ("k1", None, "k1"):
        store.book(tenant, key, USAGE)
    assert await booked(store, tenant) == {}
    await store.heartbeat()
    await store.heartbeat()
    assert await booked(store, tenant) == {"k1": Usage(200, 100, 60, 2e9, 2), None: USAGE}


@pytest.mark.parametrize("lost", range(1, 5))
async def test_it_is_booked_once_however_many_answers_are_lost(wire: Wire, tenant: str, lost: int) -> None:
    store = RedisStore(wire)
    store.book(tenant, None, USAGE)
    wire.losses = lost
    for _ in range(lost):
        with pytest.raises(StoreUnavailable):
            await store.heartbeat()
        store.book(tenant, None, USAGE)
    await store.heartbeat()
    assert (await booked(store, tenant))[None].requests == 1 + lost


async def test_it_waits_for_a_store_that_is_away(wire: Wire, tenant: str) -> None:
    store = RedisStore(wire)
    wire.is_cut = True
    store.book(tenant, None, USAGE)
    with pytest.raises(StoreUnavailable):
        await store.heartbeat()
    wire.is_cut = False
    await store.heartbeat()
    assert await booked(store, tenant) == {None: USAGE}


async def test_replicas_book_into_one_ledger(wire: Wire, tenant: str) -> None:
    for store in (RedisStore(wire), RedisStore(wire)):
        store.book(tenant, "k1", USAGE)
        await store.heartbeat()
    assert (await booked(store, tenant))["k1"] == Usage(200, 100, 60, 2e9, 2)
