"""Sums of usage by group and by day, of many ledgers at once."""

from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gateway.tenants.usage import Grouping, total_of
from quotas.policy.limit import EPOCH
from quotas.policy.policy import Policy, Price
from quotas.reservation import Usage
from quotas.store.usage_ledger import LedgerRows, kind_of, usage_of

ENTRY = np.dtype([("day", "<u2"), ("counts", "<f8", 7)])  # of lua/ledger.lua
INPUT, OUTPUT, KV, ENGINE_MICROS = 1, 3, 4, 5  # places of counts
KV_LOW_BITS = 26  # of KV byte seconds, whose sums exceed 2**53; the other bits are a further count
NUM_COUNTS = 8
MOST = 2.0**53  # of a count; another is none of ours
OF_REQUESTS = [0, 1, 2, 3, 4, 7]  # an entry without these is engine time alone

Owner = tuple[str | None, str | None]
"""A tenant, None of groups that span tenants; and the value of a group."""

Kind = tuple[Price | None, bool]
"""What its tokens cost, and whether they were in batches."""

Counts = npt.NDArray[np.int64]


class Entries(NamedTuple):
    """The entries of some ledgers on some days."""

    rows: list[tuple[str, bytes]]  # the tenant and the name of each row, also of one without entries
    row: Counts  # [num_entries], the place of its row
    day: Counts  # [num_entries], from the first day on
    counts: npt.NDArray[np.float64]  # [NUM_COUNTS, num_entries], whole numbers whose sums are below 2**53
    num_damaged: int = 0  # values that are left out


def entries_within(ledgers: Iterable[LedgerRows], first: date, last: date) -> Entries:
    read = [(one, *one.entries()) for one in ledgers]
    found = [(one, *row) for one, rows, _ in read for row in rows.items()]
    entries = np.frombuffer(b"".join([part for *_, parts in found for part in parts]), ENTRY)
    row = np.repeat(np.arange(len(found)), [sum(map(len, parts)) // ENTRY.itemsize for *_, parts in found])
    day = entries["day"].astype(np.int64) - (first - EPOCH).days
    within = (day >= 0) & (day <= (last - first).days)
    if not within.all():
        entries, row, day = entries[within], row[within], day[within]
    counts = np.empty((NUM_COUNTS, len(entries)))
    counts[:-1] = entries["counts"].T
    counts[-1] = np.floor(counts[KV] / 2**KV_LOW_BITS)
    counts[KV] -= counts[-1] * 2**KV_LOW_BITS
    num_damaged = sum(number for *_, number in read)
    if not (is_sound := (np.abs(counts) < MOST).all(axis=0)).all():
        for ledger, name, _ in map(found.__getitem__, np.unique(row[~is_sound])):
            ledger.tell(f"counts of {name!r:.200}")
        num_damaged += int(np.count_nonzero(~is_sound))
        row, day, counts = row[is_sound], day[is_sound], counts[:, is_sound]
    return Entries([(ledger.tenant, name) for ledger, name, _ in found], row, day, counts, num_damaged)


class UsageSums:
    """Adds up ledgers of some days by group and by day, at the prices of a policy."""

    def __init__(self, policy: Policy, grouping: Grouping, first: date, last: date) -> None:
        self.owners: dict[Owner, dict[int, int]] = {}  # the places of their counts, by the place of the kind
        self.num_damaged = 0  # values that are left out
        self._policy = policy
        self._grouping = grouping
        self._kinds: dict[Kind, int] = {}
        self._num_places = 0
        self._by_place: Counts = np.zeros((0, NUM_COUNTS), np.int64)
        self._by_day: Counts = np.zeros((0, (last - first).days + 1, NUM_COUNTS), np.int64)

    def add(self, entries: Entries) -> None:
        rows, row, day, counts, num_damaged = entries
        self.num_damaged += num_damaged
        if not len(row):  # nobody used anything on these days: there may be no place yet to add to
            return
        places = np.zeros((2, len(rows)), np.int64)
        used = np.flatnonzero(np.bincount(row, minlength=len(rows)))
        for at in used.tolist():
            places[:, at] = self._place(*rows[at])
        self._by_place = grown(self._by_place, self._num_places)
        self._by_day = grown(self._by_day, len(self._kinds))
        owned, place = np.unique(places[0], return_inverse=True)  # few of a hundred thousand
        self._by_place[owned] += _summed(place[row], counts, len(owned))
        by_day = self._by_day.reshape(-1, NUM_COUNTS)
        by_day += _summed(places[1][row] * self._by_day.shape[1] + day, counts, len(by_day))

    def _place(self, tenant: str, name: bytes) -> tuple[int, int]:
        """Where a row is added: the places of its owner and of its kind."""
        policy, (row, in_batches) = self._policy.tenant(tenant), kind_of(name)
        price = policy.price
        priced = price.of(row.model) if price and price.models else price, in_batches
        kind = self._kinds.setdefault(priced, len(self._kinds))
        owner = None if self._grouping.spans_tenants else tenant, self._grouping.value(row, policy)
        of_owner = self.owners.setdefault(owner, {})
        if (place := of_owner.get(kind)) is None:
            place = of_owner[kind] = self._num_places
            self._num_places += 1
        return place, kind

    def tokens(self) -> dict[Owner, int]:
        """The tokens of each group that has used anything."""
        tokens = (self._by_place[:, INPUT] + self._by_place[:, OUTPUT]).tolist()
        has_used: list[bool] = np.any(self._by_place[:, OF_REQUESTS] != 0, axis=1).tolist()
        return {
            owner: sum(tokens[place] for place in kinds.values())
            for owner, kinds in self.owners.items()
            if any(has_used[place] for place in kinds.values())
        }

    def of_owner(self, owner: Owner) -> tuple[Usage, dict[str, Decimal]]:
        """The use of a group, and its cost by currency."""
        kinds = list(self._kinds)
        return total_of(_used(kinds[kind], self._by_place[place]) for kind, place in self.owners[owner].items())

    def of_days(self) -> list[tuple[Usage, dict[str, Decimal]]]:
        """The use of each day, and its cost by currency."""
        days = range(self._by_day.shape[1])
        return [total_of(_used(kind, self._by_day[at, day]) for kind, at in self._kinds.items()) for day in days]

    def of_all(self) -> tuple[Usage, dict[str, Decimal]]:
        return total_of(_used(kind, self._by_day[at].sum(axis=0)) for kind, at in self._kinds.items())


def _used(kind: Kind, counts: Counts) -> tuple[Price | None, Usage]:
    price, in_batches = kind
    *told, kv_high = counts.tolist()
    told[KV] += kv_high << KV_LOW_BITS
    return price, usage_of(told, in_batches)


def _summed(place: Counts, counts: npt.NDArray[np.float64], num_places: int) -> Counts:
    """The counts of each place: [num_places, NUM_COUNTS]."""
    return np.stack([np.bincount(place, count, num_places) for count in counts], axis=1).astype(np.int64)


def grown(counts: Counts, size: int) -> Counts:
    """The counts, with room for this many."""
    if size <= len(counts):
        return counts
    more = np.zeros((max(size, 2 * len(counts)) - len(counts), *counts.shape[1:]), np.int64)
    return np.concatenate([counts, more])
