import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from struct import pack

import pytest
from redis import Redis

from quotas.errors import StoreUnavailable, StoreUnsuitable
from quotas.policy.limit import EPOCH, Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.account import state_key
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from quotas.store.usage_ledger import TENANTS_PER_TURN
from quotas.usage_row import UsageRow, row_name
from tests.quotas.stores import usage_by_key
from tests.quotas.wire import Wire

USAGE = Usage(100, 50, 30, 1e9)
COUNTED = (Limit(Resource.CONCURRENT_REQUESTS, 10),)
STRANGE = ["a:usage:20000", "{b}", "100% }{ ", "zürich", "*"]


@pytest.fixture
async def wire(store_url: str) -> AsyncIterator[Wire]:
    runner = ScriptRunner(store_url, timeout=60)
    await runner.client.connect()
    yield Wire(runner)
    await runner.client.close()


async def booked(store: RedisStore, tenant: str) -> dict[str | None, Usage]:
    return await usage_by_key(store, tenant, datetime.now(UTC).date())


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


async def test_charges_of_a_long_outage_join_one_batch(wire: Wire, tenant: str) -> None:
    store = RedisStore(wire)
    wire.is_cut = True
    for number in range(50):
        store.book(tenant, f"k{number % 2}", USAGE)
        with pytest.raises(StoreUnavailable):
            await store.heartbeat()
    assert len(store.ledger._closed[tenant]) == 2, "the first may have been sent"
    wire.is_cut = False
    await store.heartbeat()
    assert {key: usage.requests for key, usage in (await booked(store, tenant)).items()} == {"k0": 25, "k1": 25}


async def test_replicas_book_into_one_ledger(wire: Wire, tenant: str) -> None:
    for store in (RedisStore(wire), RedisStore(wire)):
        store.book(tenant, "k1", USAGE)
        await store.heartbeat()
    assert (await booked(store, tenant))["k1"] == Usage(200, 100, 60, 2e9, 2)


@pytest.mark.parametrize("tenant", STRANGE)
async def test_a_ledger_is_found_for_any_tenants_name(store: RedisStore, tenant: str) -> None:
    today = datetime.now(UTC).date()
    await store.settle(await store.reserve(tenant, "k1", COUNTED, Ask(1, 5, 5)), Usage(5, 3))
    found, (tenants, num_ledgers) = await store.ledger.tenant_days(), await store.ledger.tenants(date.min, date.max)
    assert (tenant, today) in found or (tenant, datetime.now(UTC).date()) in found
    assert tenant in tenants and num_ledgers >= len(found)


async def test_other_keys_of_a_large_server_are_not_taken_for_ledgers(store: RedisStore, store_url: str) -> None:
    others = {f"other:{number}": "" for number in range(3000)}
    with Redis.from_url(store_url) as client:
        client.mset({**others, "sluice:{x}:usage:1e9": "", "sluice:{x}:usage:": "", "my:sluice:{x}:usage:7": ""})
        found = await store.ledger.tenant_days()
        client.delete(*others, "sluice:{x}:usage:1e9", "sluice:{x}:usage:", "my:sluice:{x}:usage:7")
    assert "x" not in {tenant for tenant, _ in found}


async def test_long_ledgers_are_read_in_parts(store: RedisStore, store_url: str, tenant: str) -> None:
    days, entry = [date(2030, 1, 1 + number) for number in range(5)], pack("<7d", 1, 2, 0, 3, 4, 0, 1)
    with Redis.from_url(store_url) as client:
        for day in days:
            ledger = f"{state_key(tenant)}:usage:{(day - EPOCH).days}"
            client.hset(ledger, mapping={f"k{number}": entry for number in range(600)})
    found = await store.ledger.over_days([tenant, "nobody"], days[0], days[-1])
    assert [(one.tenant, len(one.entries) // 64) for one in found] == [
        (tenant, 1200), ("nobody", 0), (tenant, 1200), (tenant, 600),
    ]  # fmt: skip


async def test_an_entry_without_reasoning_of_an_older_version_is_read_and_added_to(
    store: RedisStore, store_url: str, tenant: str
) -> None:
    today = datetime.now(UTC).date()
    with Redis.from_url(store_url) as client:
        ledger = f"{state_key(tenant)}:usage:{(today - EPOCH).days}"
        client.hset(ledger, "k1", pack("<6d", 1, 100, 30, 50, 1e9, 0))
    assert await usage_by_key(store, tenant, today) == {"k1": USAGE}
    (older,) = await store.ledger.over_days([tenant], today, today)
    store.book(tenant, "k1", USAGE._replace(reasoning_tokens=7))
    await store.heartbeat()
    (newer,) = await store.ledger.over_days([tenant], today, today)
    assert [(one.names, one.entries[8:]) for one in (older, newer)] == [
        ([b"k1"], pack("<7d", 1, 100, 30, 50, 1e9, 0, 0)),
        ([b"k1"], pack("<7d", 2, 200, 60, 100, 2e9, 0, 7)),
    ]


async def test_a_user_that_may_not_list_keys_is_told_the_permission(store_url: str) -> None:
    with Redis.from_url(store_url) as client:
        client.acl_setuser("narrow", enabled=True, passwords=["+pw"], commands=["+@all", "-scan"], keys=["sluice:*"])
    store = RedisStore.at(f"{store_url.replace('://', '://narrow@')}?password=pw", timeout=5)
    await store.connect()
    with pytest.raises(StoreUnsuitable, match=r"\+scan"):
        await store.ledger.tenant_days()
    assert await usage_by_key(store, "nobody", datetime.now(UTC).date()) == {}
    await store.close()


def row(user: str, most: int = 500) -> str:
    return row_name(UsageRow("k1", "m", "batch", user, (("project", "search"),)), most)


async def rows(store: RedisStore, tenant: str) -> dict[UsageRow, Usage]:
    (found,) = await store.ledger.of([(tenant, datetime.now(UTC).date())])
    return found


async def test_use_that_limits_count_and_use_that_none_counts_are_in_one_row(store: RedisStore, tenant: str) -> None:
    reservation = await store.reserve(tenant, "k1", COUNTED, Ask(1, 5, 5, row=row("ada")))
    reservation.progress = Usage(5, 2)
    await store.heartbeat()  # a part of it
    await store.settle(reservation, Usage(5, 3))
    store.book(tenant, "k1", Usage(1, 1), row("ada"))
    store.book(tenant, "k1", Usage(1, 1), row("bob"))
    await store.heartbeat()
    named = {user: UsageRow("k1", "m", "batch", user, (("project", "search"),)) for user in ("ada", "bob")}
    assert await rows(store, tenant) == {named["ada"]: Usage(6, 4, requests=2), named["bob"]: Usage(1, 1)}
    assert await booked(store, tenant) == {"k1": Usage(7, 5, requests=3)}


async def test_a_million_users_fill_no_more_rows_than_the_policy_allows(store: RedisStore, tenant: str) -> None:
    for number in range(3000):  # more than wait in memory, too
        store.book(tenant, "k1", Usage(1, 1), row(f"user {number}", most=7))
    await store.heartbeat()
    for number in range(20):
        await store.settle(
            await store.reserve(tenant, "k1", COUNTED, Ask(1, 1, 1, row=row(f"u{number}", 7))), Usage(1, 1)
        )
    found = await rows(store, tenant)
    assert len(found) == 7 + 1
    assert sum(usage.requests for usage in found.values()) == 3020
    assert found[UsageRow("k1", "m", "batch", is_rest=True)].requests > 2990


async def test_the_time_for_which_replicas_ran_is_booked_once_for_each(store: RedisStore) -> None:
    day = date(2020, 2, 3)
    for seconds in (1.5, 2.5):  # in all
        await store.ledger.book_running(day, seconds)
    assert await store.ledger.running([day, date(2020, 2, 4)]) == [2.5, 0]


async def test_other_tasks_take_turns_with_a_flush_of_many_tenants(wire: Wire, tenant: str) -> None:
    store, turns = RedisStore(wire), list[int]()
    for number in range(3 * TENANTS_PER_TURN):
        store.book(f"{tenant}-{number}", None, USAGE)

    async def others() -> None:
        while True:
            turns.append(len(store.ledger._open))
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await store.heartbeat()
    task.cancel()
    assert {TENANTS_PER_TURN, 2 * TENANTS_PER_TURN} <= set(turns)
    assert (await booked(store, f"{tenant}-7"))[None] == USAGE
