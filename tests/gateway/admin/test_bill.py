import csv
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admin.bill import IDLE, BillReader, MachineDay, MachinePrice
from gateway.api.service import Service
from gateway.errors import BadRequest
from quotas.quotas import Quotas
from quotas.reservation import Usage
from quotas.store.redis_store import RedisStore
from tests.examples import examples

HOUR = 3600 * 1_000_000
MICROSECONDS = st.integers(0, 400 * 24 * HOUR)


@given(
    MICROSECONDS,
    st.dictionaries(st.sampled_from("abcdefgh"), MICROSECONDS),
    st.decimals(0, 99999, places=4, allow_nan=False),
)
@settings(max_examples=examples(200))
def test_the_parts_are_the_machines_price_to_the_last_digit(
    running: int, busy: dict[str, int], amount: Decimal
) -> None:
    price = MachinePrice(amount, "")
    parts = MachineDay(running, busy).parts(price)
    assert sum(parts.values()) == price.of_time(running)
    assert all(part >= 0 for part in parts.values())
    if sum(busy.values()) <= running:
        assert all(abs(parts[name] - price.of_time(used)) <= Decimal("0.1") for name, used in busy.items())


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


async def test_a_bill_needs_a_price_and_is_of_all_tenants(store: RedisStore) -> None:
    with pytest.raises(BadRequest, match="--machine-price"):
        await reader(store, None).bill({})
    with pytest.raises(BadRequest) as refused:
        await reader(store, "1/h").bill({"tenant": "acme"})
    assert refused.value.param == "tenant"
