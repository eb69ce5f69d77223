"""What the ledger of a store holds of a tenant."""

from collections.abc import Iterable
from datetime import date, timedelta

from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore


async def booked(store: RedisStore, tenant: str, days: Iterable[int]) -> Usage:
    """In all, on days that are counted from 1970 on."""
    ledgers = [await store.usage(tenant, date(1970, 1, 1) + timedelta(days=day)) for day in days]
    return sum((usage for ledger in ledgers for usage in ledger.values()), NOTHING)
