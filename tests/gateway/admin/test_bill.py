import csv
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from io import StringIO
from math import floor
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admin.bill import IDLE, BillReader, MachineDay, MachinePrice
from gateway.admin.usage import UsageReader
from gateway.api.service import Service
from gateway.errors import BadRequest
from gateway.tenants.key_source import KeySource
from quotas.policy.policy_file import parse_policy
from quotas.quotas import Quotas
from quotas.reservation import Usage
from quotas.store.redis_store import RedisStore
from tests.examples import examples

HOUR = 3600 * 1_000_000
MICROSECONDS = st.integers(0, 400 * 24 * HOUR)


@given(MICROSECONDS, st.lists(MICROSECONDS, max_size=8), st.decimals(0, 99999, places=4, allow_nan=False))
@settings(max_examples=examples(200))
def test_the_parts_are_the_machines_price_to_the_last_digit(running: int, busy: list[int], amount: Decimal) -> None:
    price = MachinePrice(amount, "")
    parts = MachineDay(running, busy).parts(price)
    assert sum(parts) == price.of_time(running) == floor(Fraction(amount) * running * 10**6 / HOUR)
    assert all(part >= 0 for part in parts)
    if sum(busy) <= running:
        assert parts[:-1] == [price.of_time(used) for used in busy]


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
    await store.ledger.book_running(today, 7200.0)
    for tenant, seconds in (("beta", 360.0), ("acme", 1800.0)):
        store.book(tenant, None, Usage(engine_seconds=seconds, requests=0))
        store.book(tenant, "k1", Usage(400_000, 100_000))
    await store.heartbeat()
    bills = reader(store, "3.50 USD/h")
    machine = await bills.begun(days)
    policies = SimpleNamespace(current=parse_policy({}))
    service = SimpleNamespace(model="m", quotas=Quotas(store, 5.0), policies=policies)
    usage = UsageReader(cast(Service, service), cast(KeySource, SimpleNamespace(in_force={})))
    report = await usage.report({}, "", machine)
    assert machine is not None and machine.bill() == await bills.bill(days)
    assert (report["total"]["requests"], report["from"]) == (2, days["from"])
    assert await bills.begun(days | {"tenant": "acme"}) is None, "idle time is of no tenant"
    assert await reader(store, None).begun(days) is None


async def test_a_bill_needs_a_price_and_is_of_all_tenants(store: RedisStore) -> None:
    with pytest.raises(BadRequest, match="--machine-price"):
        await reader(store, None).bill({})
    with pytest.raises(BadRequest) as refused:
        await reader(store, "1/h").bill({"tenant": "acme"})
    assert refused.value.param == "tenant"
