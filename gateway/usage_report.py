"""What tenants used, as rows of a table. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Context, Decimal, Inexact, localcontext
from functools import reduce
from itertools import groupby
from operator import add

from gateway.table import csv_text, table
from quotas.policy import Policy, Price
from quotas.reservation import NOTHING, Usage

COUNTS = ("requests", "input", "cached", "output")
NUMERIC = frozenset({*COUNTS, "kv_gib_s", "cost"})
EXACT = Context(prec=80, traps=[Inexact])
GIB = 2**30
NO_KEY = "-"


@dataclass(frozen=True, slots=True)
class Entry:
    """What was used on a UTC day by a tenant's key; without one: by all of its keys."""

    day: date
    tenant: str
    key: str | None
    usage: Usage


def by_tenant(entries: Iterable[Entry]) -> list[Entry]:
    """Of each tenant and day one, from entries of which those stand together."""
    groups = groupby(entries, key=lambda entry: (entry.day, entry.tenant))
    return [
        Entry(day, tenant, None, reduce(add, (entry.usage for entry in group), NOTHING))
        for (day, tenant), group in groups
    ]


def cost(usage: Usage, price: Price) -> Decimal:
    """Exactly."""
    with localcontext(EXACT):
        computed = (usage.input_tokens - usage.cached_tokens) * price.input + usage.cached_tokens * price.cached_input
        return computed + usage.output_tokens * price.output


def usage_csv(entries: Sequence[Entry], policy: Policy, has_keys: bool) -> str:
    tokens = ("input_tokens", "cached_tokens", "output_tokens")
    heading = ("day", "tenant", *_if(has_keys, "key"), "requests", *tokens, "kv_byte_seconds", "cost", "currency")
    return csv_text(heading, [_csv_row(entry, policy.tenant(entry.tenant).price, has_keys) for entry in entries])


def usage_table(entries: Sequence[Entry], policy: Policy, has_keys: bool) -> str:
    """With a last row that sums the others."""
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
    """By currency, of what has a price."""
    sums: dict[str, Decimal] = {}
    with localcontext(EXACT):
        for entry in entries:
            if price := policy.tenant(entry.tenant).price:
                sums[price.currency] = sums.get(price.currency, Decimal()) + cost(entry.usage, price)
    return dict(sorted(sums.items()))


def _totals(entries: Sequence[Entry], policy: Policy, has_keys: bool) -> list[list[str]]:
    """One row, and another for each further currency."""
    used = total(entries)
    amounts = [[plain(amount), currency] for currency, amount in costs(entries, policy).items()] or [["", ""]]
    first = ["total", "", *_if(has_keys, ""), *_counts(used), _gib(used)]
    return [first + amounts[0], *([""] * len(first) + further for further in amounts[1:])]


def _counts(usage: Usage) -> list[str]:
    return [str(usage.requests), str(usage.input_tokens), str(usage.cached_tokens), str(usage.output_tokens)]


def _gib(usage: Usage) -> str:
    return f"{usage.kv_byte_seconds / GIB:.3f}"


def plain(amount: Decimal) -> str:
    """At least cents, and no zeros behind what is more exact."""
    whole, _, digits = f"{amount:f}".partition(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


def _if(condition: bool, cell: str) -> tuple[str, ...]:
    return (cell,) if condition else ()
