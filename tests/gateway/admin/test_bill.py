import csv
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from io import StringIO
from itertools import chain
from math import floor
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.admin.bill import IDLE, MILLION, BillReader, MachineDay, MachinePrice, MachineTime
from gateway.admin.usage import UsagePeriod, UsageReader
from gateway.api.service import Service
from gateway.errors import BadRequest
from gateway.tenants.key_source import KeySource
from gateway.tenants.usage_sums import ENGINE_MICROS, NUM_COUNTS, Entries
from quotas.damage import tell
from quotas.policy.limit import EPOCH
from quotas.policy.policy_file import parse_policy
from quotas.quotas import Quotas
from quotas.reservation import Usage
from quotas.store.redis_store import RedisStore
from quotas.store.usage_ledger import UsageLedger
from tests.examples import examples

HOUR = 3600 * 1_000_000
MICROSECONDS = st.integers(0, 400 * 24 * HOUR)


@given(MICROSECONDS, st.lists(MICROSECONDS, max_size=8), st.decimals(0, 99999, places=4, allow_nan=False))
@settings(max_examples=examples(200))
def test_the_parts_are_the_machines_price_to_the_last_digit(running: int, busy: list[int], amount: Decimal) -> None:
    price = MachinePrice(amount, "")
    of_tenants, idle = MachineDay(running, np.array(busy, np.int64), np.arange(len(busy))).parts(price)
    parts: list[int] = of_tenants.tolist()
    assert sum(parts) + idle == price.of_time(running) == floor(Fraction(amount) * running * 10**6 / HOUR)
    assert all(part >= 0 for part in (*parts, idle))
    if sum(busy) <= running:
        assert parts == [price.of_time(used) for used in busy]


DAYS = [date(2026, 9, 1), date(2026, 9, 2), date(2026, 9, 3)]
BUSY = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 20 * HOUR)), max_size=6)


@given(st.lists(BUSY, max_size=4), st.lists(st.integers(0, 24 * HOUR), min_size=3, max_size=3))
@settings(max_examples=examples(60))
async def test_ledgers_of_the_same_tenants_and_days_add_up_to_the_price_of_the_running_time(
    portions: list[list[tuple[str, int, int]]], running: list[int]
) -> None:
    price = MachinePrice(Decimal("3.5"), "")
    told_running = [micros / 1e6 for micros in running], 0
    ledger = cast(UsageLedger, SimpleNamespace(running=AsyncMock(return_value=told_running)))
    machine = MachineTime(price, UsagePeriod(DAYS[0], DAYS[-1], None, "tenant"), ledger)
    await machine.begin()
    for portion in portions:
        counts = np.zeros((NUM_COUNTS, len(portion)))
        counts[ENGINE_MICROS] = [micros for *_, micros in portion]
        days = np.array([day for _, day, _ in portion], np.int64)
        machine.add(Entries([(tenant, b"") for tenant, *_ in portion], np.arange(len(portion)), days, counts))
    used = Counter[tuple[str, int]]()
    for tenant, day, micros in chain(*portions):
        used[tenant, day] += micros
    bill = machine.bill()
    seconds = {tenant: sum(used[tenant, day] for day in range(3)) / 1e6 for tenant, _ in used}
    assert {row["tenant"]: row["engine_seconds"] for row in bill["rows"]} == {
        tenant: all_days for tenant, all_days in seconds.items() if all_days
    }
    assert [day["engine_seconds"] for day in bill["days"]] == [
        sum(used[tenant, day] for tenant in "abc") / 1e6 for day in range(3)
    ]
    of_time = sum(map(price.of_time, running))
    of_rows = sum(Decimal(row["cost"]) for row in bill["rows"])
    assert (of_rows + Decimal(bill["idle_cost"])) * MILLION == Decimal(bill["cost"]) * MILLION == of_time
    told = list(csv.DictReader(StringIO(machine.csv())))
    assert sum(Decimal(row["cost"]) for row in told) * MILLION == of_time
    named = {(row["tenant"], row["day"]): Decimal(row["engine_seconds"]) * MILLION for row in told}
    for last in DAYS:
        named.pop((IDLE, str(last)), None)
    assert named == {(tenant, str(DAYS[day])): micros for (tenant, day), micros in used.items() if micros}


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore.at(redis_url, 5.0)
    await store.connect()
    yield store
    await store.close()


def reader(store: RedisStore, price: str | None) -> BillReader:
    service = SimpleNamespace(quotas=Quotas(store, 5.0))
    return BillReader(cast(Service, service), None if price is None else MachinePrice.of(price))


async def test_hours_are_divided_by_engine_time_and_the_rest_is_idle(store: RedisStore) -> None:
    today = datetime.now(UTC).date()
    await store.ledger.book_running(today, 7200.0)
    store.book("acme", None, Usage(engine_seconds=1800.0, requests=0))
    store.book("beta", None, Usage(engine_seconds=360.0, requests=0))
    store.book("acme", "k1", Usage(400_000, 100_000))
    await store.heartbeat()
    bill = await reader(store, "3.50 USD/h").bill({"from": str(today), "to": str(today)})
    assert [(row["tenant"], row["engine_seconds"], row["cost"]) for row in bill["rows"]] == [
        ("acme", 1800.0, "1.75"),
        ("beta", 360.0, "0.35"),
    ]
    assert (bill["cost"], bill["idle_cost"], bill["currency"]) == ("7.00", "4.90", "USD")
    assert (bill["cost_per_million_tokens"], bill["cost_per_million_tokens_busy"]) == ("14.00", "4.20")
    rows = list(csv.DictReader(StringIO(await reader(store, "3.50/h").csv({"from": str(today), "to": str(today)}))))
    assert [(row["tenant"], row["cost"]) for row in rows] == [("acme", "1.75"), ("beta", "0.35"), (IDLE, "4.90")]


async def test_a_report_of_usage_reads_the_ledgers_for_the_bill_too(store: RedisStore) -> None:
    today = datetime.now(UTC).date()
    days = {"from": str(today - timedelta(days=1)), "to": str(today)}
    for tenant, seconds in (("beta", 360.0), ("acme", 1800.0)):
        store.book(tenant, None, Usage(engine_seconds=seconds, requests=0))
        store.book(tenant, "k1", Usage(400_000, 100_000))
    await store.heartbeat()
    bills = reader(store, "3.50 USD/h")
    machine = bills.begun(days)
    await store.ledger.book_running(today, 7200.0)  # read beside the ledgers, not before the wait for them
    policies = SimpleNamespace(current=parse_policy({}))
    service = SimpleNamespace(model="m", quotas=Quotas(store, 5.0), policies=policies)
    usage = UsageReader(cast(Service, service), cast(KeySource, SimpleNamespace(in_force={})))
    report = await usage.report({}, "", machine)
    assert machine is not None and report["bill"] == await bills.bill(days)
    assert (report["total"]["requests"], report["from"]) == (2, days["from"])
    assert bills.begun(days | {"tenant": "acme"}) is None, "idle time is of no tenant"
    assert reader(store, None).begun(days) is None


async def test_damaged_times_are_told_and_count_as_none(
    store: RedisStore, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    tell.cache_clear()
    today = datetime.now(UTC).date()
    days = [today - timedelta(days=number) for number in range(3)]
    store.book("acme", None, Usage(engine_seconds=1800.0, requests=0))
    await store.heartbeat()
    await store.ledger.book_running(today, 7200.0)
    with Redis.from_url(redis_url) as client:
        client.set(f"sluice:running:{(days[1] - EPOCH).days}", "text")
        client.hset(f"sluice:running:{(days[2] - EPOCH).days}", "a replica", "long")
    bill = await reader(store, "3.50/h").bill({"from": str(days[2]), "to": str(today)})
    assert (bill["running_seconds"], bill["rows"][0]["cost"], bill["damaged"]) == (7200.0, "1.75", 2)
    assert "WRONGTYPE" in caplog.text and "'long'" in caplog.text


async def test_a_bill_needs_a_price_and_is_of_all_tenants(store: RedisStore) -> None:
    with pytest.raises(BadRequest, match="--machine-price"):
        await reader(store, None).bill({})
    with pytest.raises(BadRequest) as refused:
        await reader(store, "1/h").bill({"tenant": "acme"})
    assert refused.value.param == "tenant"
