"""Usage on the admin port: use and cost of tenants and keys, and the rest of their budgets."""

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from heapq import nsmallest
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from gateway.admin.rows import MAX_ROWS, Row
from gateway.api.service import Service
from gateway.errors import BadRequest, QuotaUnverifiable
from gateway.quoting import quoted
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import narrowed
from gateway.tenants.key_source import tag_values
from gateway.tenants.key_store import KeyRecord
from gateway.tenants.usage import (
    BY,
    BY_WORDS,
    LEDGER_DAYS,
    Grouping,
    TooManyLedgers,
    collect_after,
    csv_by_day,
    entries_of,
    plain,
    read_ahead,
    read_ledgers,
    usage_csv,
)
from gateway.tenants.usage_sums import Entries, Owner, UsageSums, entries_within
from quotas.errors import QuotaError
from quotas.policy.limit import Budget, BudgetPeriod, Limit
from quotas.policy.policy import Policy
from quotas.reservation import Usage
from quotas.store.budget_states import BudgetLevel, BudgetOwner
from quotas.store.usage_ledger import LedgerRows

MAX_LEDGERS = 200_000  # read by one answer; a ledger is of a tenant and a month
MAX_GROUPS = 100_000  # summed up by one answer, such as users: some 70 MB
MAX_CSV_ROWS = 500_000
MAX_BUDGETS = 500  # of one list
MAX_BUDGET_OWNERS = 20_000  # owners of budgets asked from the store: tenants and keys
BUDGETS = re.compile(rf'"limits".*/({"|".join(BudgetPeriod)})', re.DOTALL)  # in the settings of a key
OWNERS_PER_WRITE = 64  # of budgets: their answers take the event loop about half a millisecond


@dataclass(frozen=True, slots=True)
class UsagePeriod:
    """The days that a report covers, in UTC, the first and the last included."""

    first: date
    last: date
    tenant: str | None
    by: str

    @classmethod
    def of(cls, query: Mapping[str, str], today: date) -> "UsagePeriod":
        """Parse a query; the default is this month up to today. Raises `BadRequest`."""
        last = _day(query, "to", today)
        first = _day(query, "from", last.replace(day=1))
        if not 0 <= (last - first).days <= LEDGER_DAYS:
            raise BadRequest(f"from {first} to {last} must be a period of at most {LEDGER_DAYS} days.", "from")
        by = query.get("by", "tenant")
        if not BY.fullmatch(by):
            raise BadRequest(f"by must be {BY_WORDS}, got {quoted(by, 80)}.", "by")
        return cls(first, last, query.get("tenant") or None, by)

    @property
    def ledgers(self) -> tuple[str | None, date, date]:
        return self.tenant, self.first, self.last

    @property
    def days(self) -> list[date]:
        return [self.first + timedelta(days=number) for number in range((self.last - self.first).days + 1)]


@contextmanager
def explained(most: int) -> Iterator[None]:
    """Raise what reading ledgers raises as errors of the API."""
    try:
        yield
    except TooManyLedgers as error:
        raise BadRequest(
            f"{error.found} ledgers, each of a tenant and a month, exceed the limit of {most}: ask for fewer "
            "months or one tenant, or use `sluice usage`.",
            "from",
        ) from None
    except QuotaError as error:
        raise QuotaUnverifiable(f"The use cannot be read from the quota store: {error}.") from None


def _check_size(number: int, most: int, what: str) -> None:
    """Raise `BadRequest` for a report that would take too much memory."""
    if number > most:
        raise BadRequest(f"The report would have more than {most:,} {what}: ask for fewer days or one tenant.", "by")


class KeysInForce(Protocol):
    """Holds all API keys by id, in a mapping that is replaced whole."""

    @property
    def in_force(self) -> Mapping[str, KeyRecord]: ...


class LedgerBill(Protocol):
    """A bill of a period, from the same ledgers as a report of usage."""

    @property
    def period(self) -> UsagePeriod: ...
    async def begin(self) -> None: ...
    def add(self, entries: Entries) -> None: ...
    def bill(self) -> Row: ...


class UsageReader:
    """Makes one report at a time, since each may read thousands of ledgers. Sums are computed in a thread."""

    def __init__(self, service: Service, keys: KeysInForce) -> None:
        self._service = service
        self._keys = keys
        self._reading, self._reading_budgets = asyncio.Lock(), asyncio.Lock()
        self._owned: _Owned | None = None  # at the latest look

    async def report(self, query: Mapping[str, str], words: str = "", beside: LedgerBill | None = None) -> Row:
        """Usage by tenant or key, of names that contain `words`, and by day, of all; and the `bill`, if there is one
        `beside`, to which the same ledgers are added. Raises `BadRequest` and `QuotaUnverifiable`.
        """
        period = beside.period if beside is not None else UsagePeriod.of(query, datetime.now(UTC).date())
        policy = self._service.policies.current
        sums = UsageSums(policy, await self._grouping(period.by), period.first, period.last)
        async with self._reading:
            with explained(MAX_LEDGERS):
                if beside is not None:
                    await beside.begin()
                async for some in read_ledgers(self._service.quotas.store, *period.ledgers, MAX_LEDGERS):
                    await asyncio.to_thread(_add, some, period, sums, beside)
                    _check_size(len(sums.owners), MAX_GROUPS, "groups")
            bill = None if beside is None else await asyncio.to_thread(beside.bill)
            report = await asyncio.to_thread(_report, period, sums, policy, words.lower())
        return {"model": self._service.model, **report, "bill": bill}

    async def csv(self, query: Mapping[str, str]) -> str:
        """Return a row for each day, as `sluice usage --csv` writes them. Raises as `report` does."""
        period = UsagePeriod.of(query, datetime.now(UTC).date())
        policy, grouping = self._service.policies.current, await self._grouping(period.by)
        pieces, num_rows = defaultdict[date, list[str]](list), 0
        async with self._reading:
            with explained(MAX_LEDGERS):
                async for some in read_ledgers(self._service.quotas.store, *period.ledgers, MAX_LEDGERS):
                    entries = await asyncio.to_thread(entries_of, some, period.first, period.last, grouping, policy)
                    _check_size(num_rows := num_rows + len(entries), MAX_CSV_ROWS, "rows")
                    for day, text in (await asyncio.to_thread(csv_by_day, entries, grouping.column)).items():
                        pieces[day].append(text)
        return usage_csv((), grouping.column) + "".join(text for day in sorted(pieces) for text in pieces[day])

    async def _grouping(self, by: str) -> Grouping:
        kind, _, name = by.partition(".")
        if kind != "tag":
            return Grouping(by)
        policy = self._service.policies.current
        return Grouping(by, await asyncio.to_thread(tag_values, name, self._keys.in_force.values(), policy))

    async def budgets(self, words: str = "") -> Row:
        """The rest of the budgets of teams, tenants and keys in the policy, least first; names contain `words`."""
        found, num_damaged, named = list[BudgetLevel](), 0, [*self._service.keys.tenants()]
        async with self._reading_budgets:
            owned = await asyncio.to_thread(self._owners, named, words.lower())
            owners, num_left_out = owned.owners, owned.num_owners - len(owned.owners)
            starts, done = range(0, len(owners), OWNERS_PER_WRITE), 0
            async for some in read_ahead(self._levels(owners[start : start + OWNERS_PER_WRITE]) for start in starts):
                found, done = found + some, done + OWNERS_PER_WRITE
                num_damaged += sum([one.is_damaged for one in some])
                await collect_after(done, OWNERS_PER_WRITE)
                if len(found) > 4 * MAX_BUDGETS:
                    num_left_out += len(found) - MAX_BUDGETS
                    found = await asyncio.to_thread(_least, found)
        rows, num_others = await asyncio.to_thread(_budget_rows, found)
        num_damaged += num_others
        return {"budgets": rows, "truncated": num_left_out + len(found) - len(rows), "damaged": num_damaged}

    def _owners(self, named: Iterable[str], words: str) -> "_Owned":
        """The owners of budgets. They take longer to find than their levels, and stay until the policy or the keys are
        replaced.
        """
        policy, records, owned = self._service.policies.current, self._keys.in_force, self._owned
        if owned is None or (owned.version, owned.words) != (policy.version, words) or owned.records is not records:
            owned = _Owned(policy.version, records, words, *_owners(policy, named, records.values(), words))
            self._owned = owned
        return owned

    async def _levels(self, owners: list[BudgetOwner]) -> list[BudgetLevel]:
        try:
            return await self._service.quotas.store.budgets(owners)
        except QuotaError:
            return [BudgetLevel(owner, limit, None, {}, 0) for owner in owners for limit in owner.budgets]


class _Owned(NamedTuple):
    """Owners of budgets, under a policy and some keys."""

    version: str
    records: Mapping[str, KeyRecord]
    words: str  # in their names
    owners: list[BudgetOwner]  # `MAX_BUDGET_OWNERS` of them
    num_owners: int  # in all


def _owners(
    policy: Policy, named: Iterable[str], records: Iterable[KeyRecord], words: str
) -> tuple[list[BudgetOwner], int]:
    """The owners of budgets, `MAX_BUDGET_OWNERS` of them, and their number in all."""
    may_have = BUDGETS.search  # or the settings of 10,000 keys were read for nothing
    own = [
        one
        for one in records
        if one.settings and may_have(one.settings) and words in f"{one.tenant} {one.id} {one.name}".lower()
    ]
    names = (
        dict.fromkeys([*policy.tenants, *named])
        if any(map(_is_budget, policy.default.limits))
        else policy.tenants.keys()
    )
    teams = [BudgetOwner.of(None, None, team.name, team.limits) for team in policy.teams.values()]
    tenants = [BudgetOwner.of(name, None, None, policy.tenant(name).limits) for name in names]
    keys = [
        BudgetOwner.of(name, key.id, None, key.limits)
        for name, tenant in policy.tenants.items()
        for key in tenant.keys.values()
    ]
    owners = [one for one in (*teams, *tenants, *keys) if one is not None and (not words or words in _named(one))]
    room = MAX_BUDGET_OWNERS - len(owners)
    of_keys = [owner for record in own[: max(room, 0)] if (owner := _of_key(policy, record)) is not None]
    known = {(owner.tenant, owner.key) for owner in of_keys}
    shown = [owner for owner in owners[:MAX_BUDGET_OWNERS] if (owner.tenant, owner.key) not in known] + of_keys
    return shown, len(shown) + max(0, len(owners) + len(own) - MAX_BUDGET_OWNERS)


def _least(found: list[BudgetLevel]) -> list[BudgetLevel]:
    """The budgets with the least left."""
    return nsmallest(MAX_BUDGETS, found, key=_what_is_left)


def _what_is_left(one: BudgetLevel) -> tuple[bool, float, str, str]:
    return one.used is None, one.share_left, one.owner.tenant or "", one.owner.key or ""


def _named(owner: BudgetOwner) -> str:
    return f"{owner.team or ''} {owner.tenant or ''} {owner.key or ''}".lower()


def _of_key(policy: Policy, record: KeyRecord) -> BudgetOwner | None:
    """A key with settings of its own, if it has a budget."""
    narrowing, _ = narrowed(policy, Principal(record.tenant, record.id, record.scopes, record.settings))
    return BudgetOwner.of(record.tenant, record.id, None, narrowing.limits)


def _is_budget(limit: Limit) -> bool:
    return isinstance(limit.window, Budget)


def _budget_rows(found: list[BudgetLevel]) -> tuple[list[Row], int]:
    """The rows of the budgets with the least left, and how many of them are damaged beside their levels."""
    shown = _least(found)
    rows = [_budget_row(one) for one in shown]
    return rows, sum([row["damaged"] and not one.is_damaged for one, row in zip(shown, rows, strict=True)])


def _budget_row(one: BudgetLevel) -> Row:
    """Describe a budget; `left` is null if the store does not answer, or if what it has is damaged. Of a receiver of
    alerts the host is told.
    """
    owner, limit = one.owner, one.limit
    of, alerts = one.state or (None, [None] * len(limit.alerts))
    return {
        "team": owner.team,
        "tenant": owner.tenant,
        "key": owner.key,
        "resource": limit.resource,
        "period": limit.window.unit if limit.window else None,
        "amount": limit.number(limit.amount),
        "currency": limit.currency,
        "left": None if of is None else limit.number(of.remaining),
        "resets_in": None if of is None else of.reset,
        "set_aside": None if of is None else limit.number(of.set_aside),
        "lost": None if of is None else limit.number(of.lost),
        "damaged": one.is_damaged or (of is None and one.used is not None),
        "soft": limit.is_soft,
        "alerts": [
            {"at_percent": alert.percent, "host": urlsplit(alert.url).hostname, "state": end}
            for alert, end in zip(limit.alerts, alerts, strict=True)
        ],
    }


def _add(ledgers: list[LedgerRows], period: UsagePeriod, sums: UsageSums, beside: LedgerBill | None) -> None:
    entries = entries_within(ledgers, period.first, period.last)
    sums.add(entries)
    if beside is not None:
        beside.add(entries)


def _report(period: UsagePeriod, sums: UsageSums, policy: Policy, words: str) -> Row:
    tokens = sums.tokens()
    found = [owner for owner in tokens if words in f"{owner[0] or ''} {owner[1] or ''}".lower()]
    shown = nsmallest(MAX_ROWS, found, key=lambda owner: (-tokens[owner], owner[0] or "", owner[1] or ""))
    days = [{"day": day.isoformat(), **_row(*of_day)} for day, of_day in zip(period.days, sums.of_days(), strict=True)]
    report = {
        "from": period.first.isoformat(),
        "to": period.last.isoformat(),
        "by": period.by,
        "total": _row(*sums.of_all()),
        "rows": [
            _names(owner, period.by) | {"named": owner[0] in policy.tenants} | _row(*sums.of_owner(owner))
            for owner in shown
        ],
        "truncated": len(found) - len(shown),
        "days": days,
        "damaged": sums.num_damaged,
    }
    sums.owners.clear()  # takes milliseconds: not on the event loop
    return report


def _names(owner: Owner, by: str) -> Row:
    """Names a group: `value` is empty where it is unknown, and null where use is not told apart any further."""
    tenant, value = owner
    return {"tenant": tenant, "key": (value or None) if by == "key" else None, "value": value}


def _row(used: Usage, costs: Mapping[str, Decimal]) -> Row:
    """Describe usage; `costs` are by currency, exact and therefore as text, empty without a price."""
    return {
        "requests": used.requests,
        "input_tokens": used.input_tokens,
        "cached_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "reasoning_tokens": used.reasoning_tokens,
        "kv_byte_seconds": used.kv_byte_seconds,
        "costs": {currency: plain(amount) for currency, amount in costs.items()},
    }


def _day(query: Mapping[str, str], param: str, default: date) -> date:
    text = query.get(param)
    if not text:
        return default
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{param} must be a day such as 2027-01-31, got {quoted(text, 40)}.", param) from None
