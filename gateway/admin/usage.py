"""Usage on the admin port: what tenants and keys have used and spent, and what is left of their budgets."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from gateway.admin.rows import MAX_ROWS, Row
from gateway.api.service import Service
from gateway.errors import BadRequest, QuotaUnverifiable
from gateway.tenants.usage import (
    LEDGER_DAYS,
    Entry,
    TooManyLedgers,
    by_tenant,
    costs,
    plain,
    total,
    usage_csv,
    usage_entries,
)
from quotas.errors import QuotaError
from quotas.policy.limit import Budget, Limit
from quotas.policy.policy import Policy
from quotas.reservation import LimitState, Usage

MAX_LEDGERS = 20_000  # of a tenant and a day each, that one answer reads
MAX_BUDGETS = 500  # tenants and keys with one, whose state is asked for
AT_ONCE = 50  # of those
BY = ("tenant", "key")


@dataclass(frozen=True, slots=True)
class UsagePeriod:
    """The days that a report covers, in UTC, the first and the last included."""

    first: date
    last: date
    tenant: str | None
    by: str

    @classmethod
    def of(cls, query: Mapping[str, str], today: date) -> "UsagePeriod":
        """Parse a query; where it says nothing, the period is this month up to today. Raises `BadRequest`."""
        last = _day(query, "to", today)
        first = _day(query, "from", last.replace(day=1))
        if not 0 <= (last - first).days <= LEDGER_DAYS:
            raise BadRequest(f"from {first} to {last} must be a period of at most {LEDGER_DAYS} days.", "from")
        by = query.get("by", "tenant")
        if by not in BY:
            raise BadRequest(f"by must be one of {', '.join(BY)}, got {by!r:.80}.", "by")
        return cls(first, last, query.get("tenant") or None, by)


class UsageReader:
    """Makes one report at a time, since each may read thousands of ledgers. Sums are computed in a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reading = asyncio.Lock()

    async def report(self, query: Mapping[str, str]) -> Row:
        """Return usage by tenant or key, and by day. Raises `BadRequest` and `QuotaUnverifiable`."""
        period = UsagePeriod.of(query, datetime.now(UTC).date())
        entries = await self._entries(period)
        policy = self._service.policies.current
        return {"model": self._service.model, **await asyncio.to_thread(_report, period, entries, policy)}

    async def csv(self, query: Mapping[str, str]) -> str:
        """Return a row for each day, as `sluice usage --csv` writes them. Raises as `report` does."""
        period = UsagePeriod.of(query, datetime.now(UTC).date())
        entries = await self._entries(period)
        has_keys = period.by == "key"
        policy = self._service.policies.current
        return await asyncio.to_thread(lambda: usage_csv(entries if has_keys else by_tenant(entries), policy, has_keys))

    async def _entries(self, period: UsagePeriod) -> list[Entry]:
        store = self._service.quotas.store
        try:
            async with self._reading:
                return await usage_entries(store, period.tenant, period.first, period.last, MAX_LEDGERS)
        except TooManyLedgers as error:
            raise BadRequest(
                f"{error.found} ledgers, each of a tenant and a day, would have to be read, and at most {MAX_LEDGERS} "
                "are: ask for fewer days or one tenant, or use `sluice usage`.",
                "from",
            ) from None
        except QuotaError as error:
            raise QuotaUnverifiable(f"The quota store, which keeps what was used, does not answer: {error}.") from None

    async def budgets(self) -> Row:
        """Return what is left of the budgets of tenants and of keys that the policy names, the least first."""
        owners = list(self._owners())
        asked = owners[:MAX_BUDGETS]
        rows: list[Row] = []
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            for found in await asyncio.gather(*(self._left(*owner) for owner in some)):
                rows += found
        rows.sort(key=lambda row: (row["left"] is None, (row["left"] or 0) / row["amount"]))
        return {"budgets": rows, "truncated": len(owners) - len(asked)}

    def _owners(self) -> Iterable[tuple[str, str | None, tuple[Limit, ...]]]:
        """Yield each tenant or key that has a budget, with all limits that its requests are charged to."""
        policy = self._service.policies.current
        for name in sorted({*policy.tenants, *self._service.keys.tenants()}):
            tenant = policy.tenant(name)
            if any(isinstance(limit.window, Budget) for limit in tenant.limits):
                yield name, None, _charged(tenant.limits)
            for key_id, key in sorted(tenant.keys.items()):
                if any(isinstance(limit.window, Budget) for limit in key.limits):
                    yield name, key_id, _charged(tenant.limits_of(key_id))

    async def _left(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> list[Row]:
        try:
            states: Sequence[LimitState] = await self._service.quotas.states(tenant, key, limits)
        except QuotaError:
            states = ()
        known = {state.limit: state for state in states}
        own = [limit for limit in limits if isinstance(limit.window, Budget) and limit.key == key]
        return [_budget_row(tenant, key, limit, known.get(limit)) for limit in own]


def _charged(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    return tuple(limit for limit in limits if limit.is_charged)


def _budget_row(tenant: str, key: str | None, limit: Limit, state: LimitState | None) -> Row:
    """Describe a budget; `left` is null where the store does not answer."""
    return {
        "tenant": tenant,
        "key": key,
        "resource": limit.resource,
        "period": limit.window.unit if limit.window else None,
        "amount": limit.amount,
        "left": None if state is None else state.remaining,
        "resets_in": None if state is None else state.reset,
        "set_aside": None if state is None else state.set_aside,
        "lost": None if state is None else state.lost,
    }


def _report(period: UsagePeriod, entries: list[Entry], policy: Policy) -> Row:
    named = _grouped(entries, (lambda e: (e.tenant, e.key)) if period.by == "key" else (lambda e: (e.tenant, None)))
    rows = [
        {"tenant": tenant, "key": key, "named": tenant in policy.tenants, **_sums(group, policy)}
        for (tenant, key), group in named.items()
    ]
    rows.sort(key=lambda row: -(row["input_tokens"] + row["output_tokens"]))
    days = _grouped(entries, lambda entry: entry.day)
    every = [period.first + timedelta(days=number) for number in range((period.last - period.first).days + 1)]
    return {
        "from": period.first.isoformat(),
        "to": period.last.isoformat(),
        "by": period.by,
        "total": _sums(entries, policy),
        "rows": rows[:MAX_ROWS],
        "truncated": max(0, len(rows) - MAX_ROWS),
        "days": [{"day": day.isoformat(), **_sums(days.get(day, []), policy)} for day in every],
    }


def _grouped(entries: Iterable[Entry], by: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(by(entry), []).append(entry)
    return groups


def _sums(entries: Sequence[Entry], policy: Policy) -> Row:
    """Sum up usage; `costs` are by currency, exact and so as text, and empty where nothing has a price."""
    used: Usage = total(entries)
    return {
        "requests": used.requests,
        "input_tokens": used.input_tokens,
        "cached_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "kv_byte_seconds": used.kv_byte_seconds,
        "costs": {currency: plain(amount) for currency, amount in costs(entries, policy).items()},
    }


def _day(query: Mapping[str, str], param: str, default: date) -> date:
    text = query.get(param)
    if not text:
        return default
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{param} must be a day such as 2027-01-31, got {text!r:.40}.", param) from None
