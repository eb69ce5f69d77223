"""Usage of tenants as rows of a table: pure sums and prices over the entries of the store's ledgers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Context, Decimal, Inexact, localcontext
from functools import reduce
from heapq import merge
from itertools import groupby
from operator import add

from gateway.table import csv_text, table
from quotas.policy.policy import Policy, Price
from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.usage_ledger import Batch, Ledger

COUNTS = ("requests", "input", "cached", "output")
NUMERIC = frozenset({*COUNTS, "kv_gib_s", "cost"})
EXACT = Context(prec=80, traps=[Inexact])
GIB = 2**30
NO_KEY = "-"


@dataclass(frozen=True, slots=True)
class Entry:
    """Usage on a UTC day by one key of a tenant; without a key, by all of its keys."""

    day: date
    tenant: str
    key: str | None
    usage: Usage


def by_tenant(entries: Iterable[Entry]) -> list[Entry]:
    """Sum entries by tenant and day; entries of one tenant and day are adjacent."""
    groups = groupby(entries, key=lambda entry: (entry.day, entry.tenant))
    return [
        Entry(day, tenant, None, reduce(add, (entry.usage for entry in group), NOTHING))
        for (day, tenant), group in groups
    ]


def cost(usage: Usage, price: Price) -> Decimal:
    with localcontext(EXACT):
        whole = _cost(usage.input_tokens, usage.cached_tokens, usage.output_tokens, price)
        in_batches = _cost(usage.batch_input_tokens, usage.batch_cached_tokens, usage.batch_output_tokens, price)
        return whole - (1 - price.batch) * in_batches


def _cost(input_tokens: int, cached_tokens: int, output_tokens: int, price: Price) -> Decimal:
    computed = (input_tokens - cached_tokens) * price.input + cached_tokens * price.cached_input
    return computed + output_tokens * price.output


def usage_csv(entries: Iterable[Entry], policy: Policy, has_keys: bool, *, has_heading: bool = True) -> str:
    tokens = ("input_tokens", "cached_tokens", "output_tokens")
    heading = ("day", "tenant", *_if(has_keys, "key"), "requests", *tokens, "kv_byte_seconds", "cost", "currency")
    rows = (_csv_row(entry, policy.tenant(entry.tenant).price, has_keys) for entry in entries)
    return csv_text([heading, *rows] if has_heading else rows)


def usage_table(entries: Sequence[Entry], policy: Policy, has_keys: bool) -> str:
    """Return a table whose last row sums up the others."""
    heading = ("day", "tenant", *_if(has_keys, "key"), *COUNTS, "kv_gib_s", "cost", "")
    rows = [_row(entry, policy.tenant(entry.tenant).price, has_keys) for entry in entries]
    return table(heading, [*rows, *_totals(entries, policy, has_keys)], NUMERIC)


def _csv_row(entry: Entry, price: Price | None, has_keys: bool) -> list[str]:
    names = [entry.day.isoformat(), entry.tenant, *_if(has_keys, entry.key or "")]
    amount = (plain(cost(entry.usage, price)), price.currency) if price else ("", "")
    return [*names, *_counts(entry.usage), f"{entry.usage.kv_byte_seconds:.0f}", *amount]


def _row(entry: Entry, price: Price | None, has_keys: bool) -> list[str]:
    names = [entry.day.isoformat(), entry.tenant, *_if(has_keys, entry.key or NO_KEY)]
    amount = (plain(cost(entry.usage, price)), price.currency) if price else ("", "")
    return [*names, *_counts(entry.usage), _gib(entry.usage), *amount]


def total(entries: Iterable[Entry]) -> Usage:
    return reduce(add, (entry.usage for entry in entries), NOTHING)


def costs(entries: Iterable[Entry], policy: Policy) -> dict[str, Decimal]:
    """Costs by currency, of usage with a price."""
    sums: dict[str, Decimal] = {}
    with localcontext(EXACT):
        for entry in entries:
            if price := policy.tenant(entry.tenant).price:
                sums[price.currency] = sums.get(price.currency, Decimal()) + cost(entry.usage, price)
    return dict(sorted(sums.items()))


def _totals(entries: Sequence[Entry], policy: Policy, has_keys: bool) -> list[list[str]]:
    """Return one row of totals, and another for each further currency."""
    used = total(entries)
    amounts = [[plain(amount), currency] for currency, amount in costs(entries, policy).items()] or [["", ""]]
    first = ["total", "", *_if(has_keys, ""), *_counts(used), _gib(used)]
    return [first + amounts[0], *([""] * len(first) + further for further in amounts[1:])]


def _counts(usage: Usage) -> list[str]:
    return [str(usage.requests), str(usage.input_tokens), str(usage.cached_tokens), str(usage.output_tokens)]


def _gib(usage: Usage) -> str:
    return f"{usage.kv_byte_seconds / GIB:.3f}"


def plain(amount: Decimal) -> str:
    """Write an amount with at least cents, and without trailing zeros where it is more exact."""
    whole, _, digits = f"{amount:f}".partition(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


def _if(condition: bool, cell: str) -> tuple[str, ...]:
    return (cell,) if condition else ()


LEDGER_DAYS = 400  # lifetime of a ledger (lua/ledger.lua)
LEDGERS_PER_TURN = 1000
CALLS_PER_WRITE = 32  # in one write: their answers take the event loop a millisecond


class TooManyLedgers(Exception):
    """More ledgers than allowed would have to be read: `found`."""

    def __init__(self, found: int) -> None:
        super().__init__(f"{found} ledgers")
        self.found = found


async def read_ledgers(
    store: RedisStore, tenant: str | None, first: date, last: date, most: int | None = None
) -> AsyncIterator[tuple[str, date, Batch]]:
    """Yield each tenant, day and ledger, by day and tenant. Raises `QuotaError`, and `TooManyLedgers` beyond `most` of
    them.
    """
    if tenant is not None:
        ledgers = [(tenant, first + timedelta(days=number)) for number in range((last - first).days + 1)]
    else:
        ledgers = await store.ledgers(first, last)
    if most is not None and len(ledgers) > most:
        raise TooManyLedgers(len(ledgers))
    if tenant is None:
        ledgers = await asyncio.to_thread(_in_order, ledgers)
    for start in range(0, len(ledgers), CALLS_PER_WRITE):
        some = ledgers[start : start + CALLS_PER_WRITE]
        for (name, day), usage in zip(some, await store.usages(some), strict=True):
            yield name, day, usage


async def usage_entries(store: RedisStore, tenant: str | None, first: date, last: date) -> list[Entry]:
    """Return usage by day, tenant and key, in this order. Raises as `read_ledgers` does."""
    ledgers = read_ledgers(store, tenant, first, last)
    return [entry async for ledger in ledgers for entry in entries_of(*ledger)]


def entries_of(tenant: str, day: date, usage: Batch) -> list[Entry]:
    return [Entry(day, tenant, key, used) for key, used in sorted(usage.items(), key=lambda item: item[0] or "")]


def _in_order(ledgers: list[Ledger]) -> list[Ledger]:
    """Sort in pieces, so that other threads get the interpreter."""
    pieces = (ledgers[start : start + LEDGERS_PER_TURN] for start in range(0, len(ledgers), LEDGERS_PER_TURN))
    return list(merge(*(sorted(piece, key=_place) for piece in pieces), key=_place))


def _place(ledger: Ledger) -> tuple[date, str]:
    return ledger[1], ledger[0]


class UsageSums:
    """Adds up ledgers by tenant, or by tenant and key, and by day, at the prices of a policy."""

    def __init__(self, policy: Policy, by_key: bool) -> None:
        self.by_owner: dict[tuple[str, str | None], Usage] = {}
        self._by_day: dict[date, dict[Price | None, Usage]] = {}
        self._policy = policy
        self._by_key = by_key

    def add(self, tenant: str, day: date, usage: Batch) -> None:
        if not usage:
            return
        for key, used in usage.items() if self._by_key else [(None, reduce(add, usage.values()))]:
            self.by_owner[tenant, key] = self.by_owner.get((tenant, key), NOTHING) + used
        by_price, price = self._by_day.setdefault(day, {}), self._policy.tenant(tenant).price
        by_price[price] = by_price.get(price, NOTHING) + reduce(add, usage.values())

    def of_owner(self, tenant: str, key: str | None) -> tuple[Usage, dict[str, Decimal]]:
        """The use of a tenant, or of one of its keys, and its cost by currency."""
        return _sum([(self._policy.tenant(tenant).price, self.by_owner[tenant, key])])

    def of_day(self, day: date) -> tuple[Usage, dict[str, Decimal]]:
        """The use of a day, and its cost by currency."""
        return _sum(self._by_day.get(day, {}).items())

    def of_all(self) -> tuple[Usage, dict[str, Decimal]]:
        return _sum(item for by_price in self._by_day.values() for item in by_price.items())


def _sum(by_price: Iterable[tuple[Price | None, Usage]]) -> tuple[Usage, dict[str, Decimal]]:
    used, costs = NOTHING, dict[str, Decimal]()
    with localcontext(EXACT):
        for price, some in by_price:
            used += some
            if price is not None:
                costs[price.currency] = costs.get(price.currency, Decimal()) + cost(some, price)
    return used, dict(sorted(costs.items()))
