"""Usage of tenants as rows of a table: pure sums and prices over the entries of the store's ledgers."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Context, Decimal, Inexact, localcontext
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from gateway.table import csv_text, table
from quotas.policy.policy import Policy, Price, TenantPolicy
from quotas.policy.schema import TAG_NAME
from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.usage_ledger import LEDGERS_PER_WRITE, WHOLE, Batch, LedgerRows, months_of
from quotas.usage_row import UsageRow

COUNTS = ("requests", "input", "cached", "output", "reasoning")
NUMERIC = frozenset({*COUNTS, "kv_gib_s", "cost"})
T = TypeVar("T")
EXACT = Context(prec=80, traps=[Inexact])
GIB = 2**30
NONE = "-"


@dataclass(frozen=True, slots=True)
class Grouping:
    """The kind of the groups that use is told by: `tenant`, `team`, `key`, `model`, `class`, `user`, `session`,
    `metadata.NAME` of requests, or `tag.NAME` of keys.
    """

    by: str
    tags: Mapping[str, str] = field(default_factory=dict)  # for `tag.NAME`: the tag's values by key

    @property
    def column(self) -> str | None:
        """The heading of the values; None if the tenant's name says all."""
        return None if self.by == "tenant" else self.by

    @property
    def spans_tenants(self) -> bool:
        """True if one value means the same for all tenants."""
        return self.by in SHARED

    def value(self, row: UsageRow, owner: TenantPolicy) -> str | None:
        """The value of a row of a tenant: None of rows that sum up others, empty of unknown ones."""
        kind, _, _ = self.by.partition(".")
        match kind:
            case "tenant":
                return ""
            case "team":
                return owner.team or ""
            case "key":
                return row.key or ""
            case "tag":
                return self.tags.get(row.key or "", "")
            case "user" | "session" | "metadata" if row.is_rest:
                return None
        return row.part(self.by)


SHARED = ("team", "model", "class")
BY = re.compile(rf"tenant|team|key|model|class|user|session|(?:metadata|tag)\.{TAG_NAME}")
BY_WORDS = "tenant, team, key, model, class, user, session, metadata.NAME of requests or tag.NAME of keys"
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class Entry:
    """Usage on a UTC day by one group of a tenant, at each price of its models."""

    day: date
    tenant: str
    value: str | None  # of the grouping
    by_price: Mapping[Price | None, Usage]


BY_DAY = attrgetter("day")


def cost(usage: Usage, price: Price) -> Decimal:
    used = usage
    computed = used.input_tokens - used.cached_tokens, used.batch_input_tokens - used.batch_cached_tokens
    content = used.output_tokens - used.reasoning_tokens, used.batch_output_tokens - used.batch_reasoning_tokens
    parts = (
        (price.input, *computed),
        (price.cached_input, used.cached_tokens, used.batch_cached_tokens),
        (price.output, *content),
        (price.reasoning, used.reasoning_tokens, used.batch_reasoning_tokens),
    )
    with localcontext(EXACT):
        cheaper = 1 - price.batch
        return sum((amount * (whole - cheaper * in_batches) for amount, whole, in_batches in parts), Decimal())


def usage_csv(entries: Iterable[Entry], column: str | None, *, has_heading: bool = True) -> str:
    tokens = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    heading = ("day", "tenant", *_if(column, column), "requests", *tokens, "kv_byte_seconds", "cost", "currency")
    rows = (_csv_row(entry, column) for entry in entries)
    return csv_text([heading, *rows] if has_heading else rows)


def csv_by_day(entries: Iterable[Entry], column: str | None) -> dict[date, str]:
    """The rows of `usage_csv`, for a table that is put together by days."""
    days = groupby(sorted(entries, key=BY_DAY), BY_DAY)
    return {day: usage_csv(some, column, has_heading=False) for day, some in days}


def usage_table(entries: Sequence[Entry], column: str | None) -> str:
    """Return a table whose last row sums up the others."""
    heading = ("day", "tenant", *_if(column, column), *COUNTS, "kv_gib_s", "cost", "")
    rows = [_row(entry, column) for entry in entries]
    return table(heading, [*rows, *_totals(entries, column)], NUMERIC)


def _csv_row(entry: Entry, column: str | None) -> list[str]:
    names = [entry.day.isoformat(), entry.tenant, *_if(column, _named(entry))]
    used, amount = _used_and_amount(entry)
    return [*names, *_counts(used), f"{used.kv_byte_seconds:.0f}", *amount]


def _used_and_amount(entry: Entry) -> tuple[Usage, tuple[str, str]]:
    """All use of an entry, and its cost and currency; a tenant has one."""
    used, costs = total_of(entry.by_price.items())
    return used, next(((plain(amount), currency) for currency, amount in costs.items()), ("", ""))


def _named(entry: Entry) -> str:
    return OTHERS if entry.value is None else entry.value


def _row(entry: Entry, column: str | None) -> list[str]:
    names = [entry.day.isoformat(), entry.tenant, *_if(column, _named(entry) or NONE)]
    used, amount = _used_and_amount(entry)
    return [*names, *_counts(used), _gib(used), *amount]


def _totals(entries: Sequence[Entry], column: str | None) -> list[list[str]]:
    """Return one row of totals, and another for each further currency."""
    used, costs = total_of(priced for entry in entries for priced in entry.by_price.items())
    amounts = [[plain(amount), currency] for currency, amount in costs.items()] or [["", ""]]
    first = ["total", "", *_if(column, ""), *_counts(used), _gib(used)]
    return [first + amounts[0], *([""] * len(first) + further for further in amounts[1:])]


def _counts(usage: Usage) -> list[str]:
    tokens = usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens
    return [str(count) for count in (usage.requests, *tokens)]


def _gib(usage: Usage) -> str:
    return f"{usage.kv_byte_seconds / GIB:.3f}"


def plain(amount: Decimal) -> str:
    """Write an amount with at least cents, and without trailing zeros where it is more exact."""
    whole, _, digits = f"{amount:f}".partition(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


def _if(column: str | None, cell: str | None) -> tuple[str, ...]:
    return (cell or "",) if column else ()


LEDGER_DAYS = 400  # for which a day stays in its ledger at least (lua/ledger.lua)
LONG_LEDGERS_AT_ONCE = 8  # read on in one write
MAX_WORDS_HELD = 400_000  # of the ledgers read together, some 60 MB; beyond them, one long ledger is read on
LEDGERS_PER_TURN = 1000  # between collections of garbage


class TooManyLedgers(Exception):
    """More ledgers than allowed would have to be read: `found`."""

    def __init__(self, found: int) -> None:
        super().__init__(f"{found} ledgers")
        self.found = found


async def collect_after(done: int, now: int) -> None:
    """Collect young garbage once for each `LEDGERS_PER_TURN` that are `done`, `now` of them the latest: a collection
    that meets the objects of tens of thousands stops every thread for 10 ms.
    """
    if done % LEDGERS_PER_TURN < now:
        await asyncio.to_thread(gc.collect, 0)


async def read_ahead(calls: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[T]:
    """Yield the results of calls in order, each while the next one is answered."""
    asked: asyncio.Task[T] | None = None
    try:
        for call in calls:
            before, asked = asked, asyncio.create_task(call)
            if before is not None:
                yield await before
        if asked is not None:
            yield await asked
    finally:
        if asked is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


async def read_ledgers(
    store: RedisStore, tenant: str | None, first: date, last: date, most: int | None = None
) -> AsyncIterator[list[LedgerRows]]:
    """Yield the ledgers of the months of these days by tenant, some at once. Raises `QuotaError`, and `TooManyLedgers`
    beyond `most` of them.
    """
    if tenant is not None:
        ledgers = [(tenant, month) for month in months_of(first, last)]
    else:
        ledgers = await store.ledger.ledgers(first, last)
    if most is not None and len(ledgers) > most:
        raise TooManyLedgers(len(ledgers))
    starts, done = range(0, len(ledgers), LEDGERS_PER_WRITE), 0
    async for found in read_ahead(store.ledger.read(ledgers[start : start + LEDGERS_PER_WRITE]) for start in starts):
        async for whole in _whole(store, found):
            yield whole
        done += LEDGERS_PER_WRITE
        await collect_after(done, LEDGERS_PER_WRITE)


async def _whole(store: RedisStore, found: list[LedgerRows]) -> AsyncIterator[list[LedgerRows]]:
    """Yield these ledgers in their order. Long ones are read to their ends side by side, as far as they may be held."""
    while found:
        long = [place for place, one in enumerate(found) if one.cursor != WHOLE]
        num_whole = long[0] if long else len(found)
        if num_whole:
            yield found[:num_whole]
            del found[:num_whole]  # or they would be held meanwhile
            continue
        may_hold = sum(len(one.words) for one in found) <= MAX_WORDS_HELD
        some = long[: LONG_LEDGERS_AT_ONCE if may_hold else 1]
        for place, one in zip(some, await store.ledger.read_on([found[place] for place in some]), strict=True):
            found[place] = one


async def usage_entries(
    store: RedisStore, tenant: str | None, first: date, last: date, grouping: Grouping, policy: Policy
) -> list[Entry]:
    """Return usage by day, tenant and group, in this order. Raises as `read_ledgers` does."""
    pages = read_ledgers(store, tenant, first, last)
    entries = [entry async for page in pages for entry in entries_of(page, first, last, grouping, policy)]
    return sorted(entries, key=BY_DAY)


def entries_of(
    ledgers: Iterable[LedgerRows], first: date, last: date, grouping: Grouping, policy: Policy
) -> list[Entry]:
    """The usage on these days by ledger, day and group, at the prices of the policy."""
    used = ((one.tenant, day, batch) for one in ledgers for day, batch in one.by_day(first, last).items())
    return [entry for of_day in used for entry in _entries(*of_day, grouping, policy.tenant(of_day[0]))]


def _entries(tenant: str, day: date, usage: Batch, grouping: Grouping, owner: TenantPolicy) -> list[Entry]:
    """The usage of a tenant's day, by group; without requests and tokens there is none."""
    groups, price = dict[str | None, dict[Price | None, Usage]](), owner.price
    for row, used in usage.items():
        if any(used[:5]):
            of_group = groups.setdefault(grouping.value(row, owner), {})
            of_row = price.of(row.model) if price and price.models else price
            of_group[of_row] = of_group.get(of_row, NOTHING) + used
    order = sorted(groups.items(), key=lambda group: (group[0] is None, group[0] or ""))
    return [Entry(day, tenant, value, by_price) for value, by_price in order]


def total_of(by_price: Iterable[tuple[Price | None, Usage]]) -> tuple[Usage, dict[str, Decimal]]:
    """All of this use, and its cost by currency."""
    used, costs = NOTHING, dict[str, Decimal]()
    with localcontext(EXACT):
        for price, some in by_price:
            used += some
            if price is not None:
                costs[price.currency] = costs.get(price.currency, Decimal()) + cost(some, price)
    return used, dict(sorted(costs.items()))
