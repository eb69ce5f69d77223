"""Usage of tenants as rows of a table: pure sums and prices over the entries of the store's ledgers."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Context, Decimal, Inexact, localcontext
from heapq import merge

from gateway.table import csv_text, table
from quotas.policy.policy import Policy, Price
from quotas.policy.schema import TAG_NAME
from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.usage_ledger import Batch, Ledger, TenantLedgers
from quotas.usage_row import UsageRow

COUNTS = ("requests", "input", "cached", "output", "reasoning")
NUMERIC = frozenset({*COUNTS, "kv_gib_s", "cost"})
EXACT = Context(prec=80, traps=[Inexact])
GIB = 2**30
NONE = "-"


@dataclass(frozen=True, slots=True)
class Grouping:
    """The kind of the groups that use is told by: `tenant`, `key`, `model`, `class`, `user`, `metadata.NAME` of
    requests, or `tag.NAME` of keys.
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

    def value(self, row: UsageRow) -> str | None:
        """The value of a row: None of rows that sum up others, empty of unknown ones."""
        kind, _, _ = self.by.partition(".")
        match kind:
            case "tenant":
                return ""
            case "key":
                return row.key or ""
            case "tag":
                return self.tags.get(row.key or "", "")
            case "user" | "metadata" if row.is_rest:
                return None
        return row.part(self.by)


SHARED = ("model", "class")
BY = re.compile(rf"tenant|key|model|class|user|(?:metadata|tag)\.{TAG_NAME}")
BY_WORDS = "tenant, key, model, class, user, metadata.NAME of requests or tag.NAME of keys"
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class Entry:
    """Usage on a UTC day by one group of a tenant, at each price of its models."""

    day: date
    tenant: str
    value: str | None  # of the grouping
    by_price: Mapping[Price | None, Usage]


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


LEDGER_DAYS = 400  # lifetime of a ledger (lua/ledger.lua)
LEDGERS_PER_TURN = 1000  # between turns of other threads, and between collections of garbage
CALLS_PER_WRITE = 32  # in one write: their answers take the event loop a millisecond
TENANTS_PER_WRITE = 100  # likewise, of months of one row


class TooManyLedgers(Exception):
    """More ledgers than allowed would have to be read: `found`."""

    def __init__(self, found: int) -> None:
        super().__init__(f"{found} ledgers")
        self.found = found


Page = list[tuple[str, date, Batch]]
"""Some ledgers, each of a tenant and a day. To go through them may take tenths of a second, which is for a thread."""


async def read_ledgers(
    store: RedisStore, tenant: str | None, first: date, last: date, most: int | None = None
) -> AsyncIterator[Page]:
    """Yield all ledgers of the days, by day and tenant. Raises `QuotaError`, and `TooManyLedgers` beyond `most` of
    them.
    """
    if tenant is not None:
        ledgers = [(tenant, first + timedelta(days=number)) for number in range((last - first).days + 1)]
    else:
        ledgers = await store.ledger.tenant_days(first, last)
    if most is not None and len(ledgers) > most:
        raise TooManyLedgers(len(ledgers))
    if tenant is None:
        ledgers = await asyncio.to_thread(_in_order, ledgers)
    for start in range(0, len(ledgers), CALLS_PER_WRITE):
        some = ledgers[start : start + CALLS_PER_WRITE]
        yield [(name, day, usage) for (name, day), usage in zip(some, await store.ledger.of(some), strict=True)]
        await collect_after(start + len(some), len(some))


async def collect_after(done: int, now: int) -> None:
    """Collect young garbage once for each `LEDGERS_PER_TURN` that are `done`, `now` of them the latest: a collection
    that meets the objects of tens of thousands stops every thread for 10 ms.
    """
    if done % LEDGERS_PER_TURN < now:
        await asyncio.to_thread(gc.collect, 0)


async def read_sums(
    store: RedisStore, tenant: str | None, first: date, last: date, most: int
) -> AsyncIterator[list[TenantLedgers]]:
    """Yield the ledgers of the days, some tenants' at once. Raises as `read_ledgers` does."""
    tenants, num_ledgers = ([tenant], 1) if tenant is not None else await store.ledger.tenants(first, last)
    if num_ledgers > most:
        raise TooManyLedgers(num_ledgers)
    reading = None
    try:
        for start in range(0, len(tenants), TENANTS_PER_WRITE):
            before, some = reading, tenants[start : start + TENANTS_PER_WRITE]
            reading = asyncio.create_task(store.ledger.over_days(some, first, last))  # while those before are summed up
            if before is not None:
                yield await before
            await collect_after(start, TENANTS_PER_WRITE)
        if reading is not None:
            yield await reading
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def usage_entries(
    store: RedisStore, tenant: str | None, first: date, last: date, grouping: Grouping, policy: Policy
) -> list[Entry]:
    """Return usage by day, tenant and group, in this order. Raises as `read_ledgers` does."""
    pages = read_ledgers(store, tenant, first, last)
    return [entry async for page in pages for entry in entries_of(page, grouping, policy)]


def entries_of(page: Page, grouping: Grouping, policy: Policy) -> list[Entry]:
    """The usage in these ledgers, by ledger and group, at the prices of the policy."""
    return [entry for ledger in page for entry in _entries(*ledger, grouping, policy.tenant(ledger[0]).price)]


def _entries(tenant: str, day: date, usage: Batch, grouping: Grouping, price: Price | None) -> list[Entry]:
    """The usage in a ledger, by group; without requests and tokens there is none."""
    groups = dict[str | None, dict[Price | None, Usage]]()
    for row, used in usage.items():
        if any(used[:5]):
            of_group = groups.setdefault(grouping.value(row), {})
            of_row = price.of(row.model) if price and price.models else price
            of_group[of_row] = of_group.get(of_row, NOTHING) + used
    order = sorted(groups.items(), key=lambda group: (group[0] is None, group[0] or ""))
    return [Entry(day, tenant, value, by_price) for value, by_price in order]


def _in_order(ledgers: list[Ledger]) -> list[Ledger]:
    """Sort in pieces, so that other threads get the interpreter."""
    pieces = (ledgers[start : start + LEDGERS_PER_TURN] for start in range(0, len(ledgers), LEDGERS_PER_TURN))
    return list(merge(*(sorted(piece, key=_place) for piece in pieces), key=_place))


def _place(ledger: Ledger) -> tuple[date, str]:
    return ledger[1], ledger[0]


def total_of(by_price: Iterable[tuple[Price | None, Usage]]) -> tuple[Usage, dict[str, Decimal]]:
    """All of this use, and its cost by currency."""
    used, costs = NOTHING, dict[str, Decimal]()
    with localcontext(EXACT):
        for price, some in by_price:
            used += some
            if price is not None:
                costs[price.currency] = costs.get(price.currency, Decimal()) + cost(some, price)
    return used, dict(sorted(costs.items()))
