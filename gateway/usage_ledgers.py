"""What the quota store has booked, read from its ledgers."""

import asyncio
from datetime import date, timedelta

from gateway.usage_report import Entry
from quotas.store import Store

LEDGER_DAYS = 400  # that a ledger is kept (lua/ledger.lua)
AT_ONCE = 64  # questions in one write: their answers keep an event loop for a millisecond or two


class TooManyLedgers(Exception):
    """`found` would have to be read."""

    def __init__(self, found: int) -> None:
        super().__init__(f"{found} ledgers")
        self.found = found


async def usage_entries(
    store: Store, tenant: str | None, first: date, last: date, most: int | None = None
) -> list[Entry]:
    """By day, tenant and key. Raises `QuotaError`, and `TooManyLedgers` where there are more than `most`, of a tenant
    and a day each.
    """
    if tenant is not None:
        days = [first + timedelta(days=number) for number in range((last - first).days + 1)]
        ledgers = [(tenant, day) for day in days]
    else:
        ledgers = [(name, day) for name, day in await store.ledgers() if first <= day <= last]
    if most is not None and len(ledgers) > most:
        raise TooManyLedgers(len(ledgers))
    entries: list[Entry] = []
    for start in range(0, len(ledgers), AT_ONCE):
        some = ledgers[start : start + AT_ONCE]
        usages = await asyncio.gather(*(store.usage(name, day) for name, day in some))
        for (name, day), by_key in zip(some, usages, strict=True):
            entries += [Entry(day, name, key, usage) for key, usage in by_key.items()]
    return sorted(entries, key=lambda entry: (entry.day, entry.tenant, entry.key or ""))
