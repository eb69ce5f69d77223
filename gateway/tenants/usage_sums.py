"""Sums of usage by group and by day, of many ledgers at once."""

from collections.abc import Sequence
from datetime import date
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from gateway.tenants.usage import Grouping, total_of
from quotas.policy.limit import EPOCH
from quotas.policy.policy import Policy, Price
from quotas.reservation import Usage
from quotas.store.usage_ledger import TenantLedgers, kind_of, usage_of

NUM_COUNTS = 7
ENTRY = np.dtype([("day", "<u4"), ("row", "<u4"), ("counts", "<f8", NUM_COUNTS)])  # of lua/read_usage.lua
INPUT, OUTPUT, ENGINE_MICROS = 1, 3, 5  # places of counts
OF_REQUESTS = 5  # the first of them: an entry without these is engine time alone

Owner = tuple[str | None, str | None]
"""A tenant, None of groups that span tenants; and the value of a group."""

Kind = tuple[Price | None, bool]
"""What its tokens cost, and whether they were in batches."""

Counts = npt.NDArray[np.int64]


def entry_array(ledgers: Sequence[TenantLedgers]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(one.entries for one in ledgers), ENTRY)


class UsageSums:
    """Adds up ledgers of some days by group and by day, at the prices of a policy."""

    def __init__(self, policy: Policy, grouping: Grouping, first: date, last: date) -> None:
        self.owners: dict[Owner, dict[Kind, int]] = {}  # the places of their counts
        self._policy = policy
        self._grouping = grouping
        self._first = (first - EPOCH).days
        self._kinds: dict[Kind, int] = {}
        self._num_places = 0
        self._by_place: Counts = np.zeros((0, NUM_COUNTS), np.int64)
        self._by_day: Counts = np.zeros((0, (last - first).days + 1, NUM_COUNTS), np.int64)

    def add(self, ledgers: Sequence[TenantLedgers]) -> None:
        places = [self._places(one) for one in ledgers]
        starts = np.cumsum([0, *map(len, places)])[:-1]
        entries = entry_array(ledgers)
        rows = np.repeat(starts, [len(one.entries) // ENTRY.itemsize for one in ledgers]) + entries["row"] - 1
        place, kind = np.array([row for some in places for row in some], np.int64).reshape(-1, 2)[rows].T
        counts = entries["counts"].astype(np.int64)
        self._by_place = _grown(self._by_place, 1 + int(place.max(initial=-1)))
        self._by_day = _grown(self._by_day, len(self._kinds))
        np.add.at(self._by_place, place, counts)
        np.add.at(self._by_day, (kind, entries["day"].astype(np.int64) - self._first), counts)

    def _places(self, ledgers: TenantLedgers) -> list[tuple[int, int]]:
        """Where each row of a tenant is added: the places of its owner and of its kind."""
        price, found = self._policy.tenant(ledgers.tenant).price, list[tuple[int, int]]()
        tenant = None if self._grouping.spans_tenants else ledgers.tenant
        for name in ledgers.names:
            row, in_batches = kind_of(name)
            kind = price.of(row.model) if price and price.models else price, in_batches
            of_owner = self.owners.setdefault((tenant, self._grouping.value(row)), {})
            place = of_owner.setdefault(kind, -1)
            if place < 0:
                place = of_owner[kind] = self._num_places
                self._num_places += 1
            found.append((place, self._kinds.setdefault(kind, len(self._kinds))))
        return found

    def tokens(self) -> dict[Owner, int]:
        """The tokens of each group that has used anything."""
        tokens = (self._by_place[:, INPUT] + self._by_place[:, OUTPUT]).tolist()
        has_used: list[bool] = np.any(self._by_place[:, :OF_REQUESTS] != 0, axis=1).tolist()
        return {
            owner: sum(tokens[place] for place in kinds.values())
            for owner, kinds in self.owners.items()
            if any(has_used[place] for place in kinds.values())
        }

    def of_owner(self, owner: Owner) -> tuple[Usage, dict[str, Decimal]]:
        """The use of a group, and its cost by currency."""
        return total_of(_used(kind, self._by_place[place]) for kind, place in self.owners[owner].items())

    def of_days(self) -> list[tuple[Usage, dict[str, Decimal]]]:
        """The use of each day, and its cost by currency."""
        days = range(self._by_day.shape[1])
        return [total_of(_used(kind, self._by_day[at, day]) for kind, at in self._kinds.items()) for day in days]

    def of_all(self) -> tuple[Usage, dict[str, Decimal]]:
        return total_of(_used(kind, self._by_day[at].sum(axis=0)) for kind, at in self._kinds.items())


def _used(kind: Kind, counts: Counts) -> tuple[Price | None, Usage]:
    price, in_batches = kind
    return price, usage_of(counts.tolist(), in_batches)


def _grown(counts: Counts, size: int) -> Counts:
    """The counts, with room for this many."""
    if size <= len(counts):
        return counts
    more = np.zeros((max(size, 2 * len(counts)) - len(counts), *counts.shape[1:]), np.int64)
    return np.concatenate([counts, more])
