import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from struct import Struct
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from quotas.errors import StoreFault, StoreUnavailable, StoreUnsuitable
from quotas.policy.limit import EPOCH, Budget, BudgetPeriod, Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.account import state_key
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import Script, ScriptRunner
from quotas.store.usage_ledger import ENTRY, TENANTS_PER_TURN, WHOLE, Batch, LedgerRows, months_of
from quotas.usage_row import UsageRow, row_name
from tests.examples import examples
from tests.quotas.store_model import DAY
from tests.quotas.stores import usage_by_key, usage_by_row
from tests.quotas.wire import Wire

USAGE = Usage(100, 50, 30, 1e9)
COUNTED = (Limit(Resource.CONCURRENT_REQUESTS, 10),)
NUM_ROWS = Struct("<HI")  # of lua/ledger.lua: the rows of a day
STRANGE = ["a:ledger:20000", "{b}", "100% }{ ", "zürich", "*"]


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


async def test_what_is_settled_beside_a_ledger_that_is_no_hash_is_given_back_once(wire: Wire, tenant: str) -> None:
    """What a script has written stays when it fails, and would be written again by the next try."""
    store, today = RedisStore(wire), datetime.now(UTC).date()
    limits, reclaim = (Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.DAY)),), Script.RECLAIM
    await store.settle(await store.reserve(tenant, None, limits, Ask(1, 300, 0)), Usage(300))
    settled = await store.reserve(tenant, None, limits, Ask(1, 100, 0))
    await store.reserve(tenant, None, limits, Ask(1, 50, 0))
    state = state_key(tenant).encode()
    await wire.client.execute(b"SET", b"%b:ledger:%d" % (state, (today.replace(day=1) - EPOCH).days), b"text")
    await store.settle(settled, Usage())
    replica = store._replica.id.encode()
    for _ in range(2):
        assert await wire.call(reclaim, (state,), replica, b"60000000", b"99", b"99") == [b"OK"]
    assert [one.remaining for one in await store.states(tenant, None, limits)] == [700]
    store.book(tenant, None, USAGE)
    with pytest.raises(StoreFault):
        await store.heartbeat()
    await wire.client.execute(b"DEL", b"%b:ledger:%d" % (state, (today.replace(day=1) - EPOCH).days))
    await store.heartbeat()
    assert await booked(store, tenant) == {None: USAGE}, "use that no limit counts is kept until it can be booked"


@pytest.mark.parametrize("tenant", STRANGE)
async def test_a_ledger_is_found_for_any_tenants_name(store: RedisStore, tenant: str) -> None:
    today = datetime.now(UTC).date()
    await store.settle(await store.reserve(tenant, "k1", COUNTED, Ask(1, 5, 5)), Usage(5, 3))
    found = await store.ledger.ledgers(today, datetime.now(UTC).date())
    assert tenant in {name for name, _ in found} and {month.day for _, month in found} == {1}


async def test_other_keys_of_a_large_server_are_not_taken_for_ledgers(store: RedisStore, store_url: str) -> None:
    others = {f"other:{number}": "" for number in range(3000)}
    with Redis.from_url(store_url) as client:
        strange = ("sluice:{x}:ledger:1e9", "sluice:{x}:ledger:", "my:sluice:{x}:ledger:0", "sluice:{x}:ledger:7")
        client.mset({**others, **dict.fromkeys(strange, "")})
        found = [*await store.ledger.ledgers(EPOCH, EPOCH), *await store.ledger.ledgers(EPOCH, date(1971, 1, 1))]
        client.delete(*others, *strange)
    assert "x" not in {tenant for tenant, _ in found}


async def test_a_long_ledger_is_read_in_parts(store: RedisStore, store_url: str, tenant: str) -> None:
    day = date(2030, 1, 1)
    number = (day - EPOCH).days
    entries = {f"{number // 8} k{place}": ENTRY.pack(number, 1, 2, 0, 3, 4, 0, 1) for place in range(2000)}
    with Redis.from_url(store_url) as client:
        client.hset(f"{state_key(tenant)}:ledger:{number}", mapping=entries)
    begun, nobody = await store.ledger.read([(tenant, day), ("nobody", day)])
    assert len(begun.words) < 2000 and nobody[:4] == ("nobody", day, [], b"0")
    found = await usage_by_row(store, tenant, day)
    assert len(found) == 2000 and set(found.values()) == {Usage(2, 3, 0, 4.0, reasoning_tokens=1)}


async def test_a_long_ledger_begins_again_on_another_server(store: RedisStore, store_url: str, tenant: str) -> None:
    """Of whose hash the cursor is another place."""
    day, client = date(2030, 1, 1), store.ledger._runner.client
    number = (day - EPOCH).days
    name = f"{state_key(tenant)}:ledger:{number}"
    with Redis.from_url(store_url) as redis:
        redis.hset(name, mapping={f"1 k{place}": ENTRY.pack(number, *[1] * 7) for place in range(2000)})
        (rows,) = await store.ledger.read([(tenant, day)])
        assert client._link is not None
        await client._link.close()
        redis.hset(name, mapping={f"1 k{place}": ENTRY.pack(number, *[2] * 7) for place in range(2000)})
    while rows.cursor != WHOLE:
        (rows,) = await store.ledger.read_on([rows])
    assert {usage.requests for usage in rows.by_day(day, day)[day].values()} == {2}
    assert len(rows.entries()[0]) == 2000


def test_a_field_that_the_store_tells_twice_counts_once() -> None:
    first, later = (ENTRY.pack(20000, number, 0, 0, 0, 0, 0, 0) for number in (1, 2))
    rows = LedgerRows("a", date(2024, 10, 1), [b"2500 k1", first, b"#", b"", b"2500 k1", later])
    assert rows.by_day(EPOCH, date.max) == {date(2024, 10, 4): {UsageRow("k1"): Usage(requests=2)}}


@given(st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 5), st.integers(-2, 9)), max_size=20))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_each_day_has_its_own_usage_and_keeps_its_limit_of_rows_though_the_clock_jumps_ahead_and_back(
    runner: ScriptRunner, steps: list[tuple[int, int, int]]
) -> None:
    store, tenant, start, number = RedisStore(runner), uuid4().hex, 20_000, 20_000
    by_day = Counter[int]()

    for days, user, requests in steps:
        number += days
        by_day[number] += requests
        await runner.client.execute(b"SET", b"test:clock", b"%d" % (number * DAY))
        store.book(tenant, "k1", Usage(requests=requests), row(str(user), most=3))
        await store.ledger.flush()
    first, last = (EPOCH + timedelta(days=start + more) for more in (-400, 400))
    ledgers = await store.ledger.read([(tenant, month) for month in months_of(first, last)])
    found = [(day, batch) for one in ledgers for day, batch in one.by_day(first, last).items()]
    told = Counter[int]()
    for day, batch in found:
        told[(day - EPOCH).days] += sum(usage.requests for usage in batch.values())
        assert len(batch) <= 3 + 1
    assert +told == +by_day and -told == -by_day and len(told) == len(found)
    for one in ledgers:
        for field, entries in zip(one.words[::2], one.words[1::2], strict=True):
            days = [day for day, *_ in (NUM_ROWS if field == b"#" else ENTRY).iter_unpack(entries)]
            assert len(set(days)) == len(days) <= (31 if field == b"#" else 8)


async def test_settled_use_is_of_the_clocks_day_after_it_was_ahead(
    runner: ScriptRunner,
) -> None:
    store, tenant, ahead, today = RedisStore(runner), uuid4().hex, date(2028, 3, 27), date(2028, 3, 18)

    for day in (ahead, today, today):
        await runner.client.execute(b"SET", b"test:clock", b"%d" % ((day - EPOCH).days * DAY))
        await store.settle(await store.reserve(tenant, "k1", COUNTED, Ask(1, 5, 5)), Usage(5, 3))
    assert await usage_by_key(store, tenant, today) == {"k1": Usage(10, 6, requests=2)}
    assert await usage_by_key(store, tenant, ahead) == {"k1": Usage(5, 3)}


async def test_a_user_that_may_not_list_keys_is_told_the_permission(store_url: str) -> None:
    with Redis.from_url(store_url) as client:
        client.acl_setuser("narrow", enabled=True, passwords=["+pw"], commands=["+@all", "-scan"], keys=["sluice:*"])
    store = RedisStore.at(f"{store_url.replace('://', '://narrow@')}?password=pw", timeout=5)
    await store.connect()
    with pytest.raises(StoreUnsuitable, match=r"\+scan"):
        await store.ledger.ledgers(EPOCH, EPOCH)
    assert await usage_by_key(store, "nobody", datetime.now(UTC).date()) == {}
    await store.close()


def row(user: str, most: int = 500) -> str:
    return row_name(UsageRow("k1", "m", "batch", user, (("project", "search"),)), most)


async def rows(store: RedisStore, tenant: str) -> Batch:
    return await usage_by_row(store, tenant, datetime.now(UTC).date())


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
    assert await store.ledger.running([day, date(2020, 2, 4)]) == ([2.5, 0], 0)


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
