"""The machine's bill: its price by the hour, divided among tenants by engine time, and what was idle."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from heapq import nsmallest

import numpy as np
import numpy.typing as npt

from gateway.admin.rows import MAX_ROWS, Row
from gateway.admin.usage import MAX_LEDGERS, UsagePeriod, explained
from gateway.api.service import Service
from gateway.errors import BadRequest
from gateway.table import csv_text
from gateway.tenants.usage import plain, read_ledgers
from gateway.tenants.usage_sums import ENGINE_MICROS, INPUT, OUTPUT, Entries, entries_within
from quotas.store.usage_ledger import UsageLedger

HOUR = 3_600_000_000  # microseconds
MILLION = 1_000_000  # money is counted in millionths
IDLE = "(idle)"
Micros = npt.NDArray[np.int64]
BUSY = np.dtype([("place", "<u4"), ("day", "<u2"), ("micros", "<i8")])  # engine time of a tenant's row on a day


@dataclass(frozen=True, slots=True)
class MachinePrice:
    """The price of an hour of each replica's machine."""

    amount: Decimal
    currency: str  # empty: not said

    @classmethod
    def of(cls, text: str) -> "MachinePrice":
        """Parse a setting such as `3.50/h` or `3.50 USD/h`, whose form settings check."""
        amount, _, currency = text.removesuffix("/h").partition(" ")
        return cls(Decimal(amount), currency)

    @property
    def _rate(self) -> tuple[int, int]:
        """The price in millionths, and the microseconds that it is of."""
        return (Fraction(self.amount) * MILLION / HOUR).as_integer_ratio()

    def of_time(self, microseconds: int) -> int:
        """The price of this time in millionths, rounded down."""
        amount, time = self._rate
        return microseconds * amount // time

    def of_times(self, microseconds: Micros) -> Micros:
        """The price of each of these times."""
        return _scaled(microseconds, *self._rate)


@dataclass(slots=True)
class MachineDay:
    """Microseconds of one UTC day: for which machines ran, and of the engine for each tenant that had some."""

    running: int
    busy: Micros
    places: Micros  # of these tenants

    def parts(self, price: MachinePrice) -> tuple[Micros, int]:
        """The day's price in millionths for each tenant, and of idle time: together exactly the price of the time for
        which machines ran. Where tenants were charged for more time, such as that of compilers beside the engine, their
        parts shrink.
        """
        charged = int(self.busy.sum())
        parts = price.of_times(self.busy if charged <= self.running else _scaled(self.busy, self.running, charged))
        return parts, price.of_time(self.running) - int(parts.sum())


class MachineTime:
    """The time for which machines ran on the days of a period, the engine time of each tenant, and their tokens."""

    def __init__(self, price: MachinePrice, period: UsagePeriod, ledger: UsageLedger) -> None:
        self.period = period
        self._price = price
        self._ledger = ledger
        self._running: Sequence[float] = ()  # seconds of each day
        self._num_damaged = 0  # values that are left out
        self._tokens = 0
        self._places = dict[str, int]()  # by tenant
        self._busy = [np.zeros(0, BUSY)]  # sparse: most of 100,000 tenants compute on few of 366 days

    async def begin(self) -> None:
        """Read for how long machines ran: beside the ledgers, or engine time could exceed it. Raises `QuotaError`."""
        self._running, self._num_damaged = await self._ledger.running(self.period.days)

    def add(self, entries: Entries) -> None:
        """Add the engine time and the tokens of some ledgers."""
        places, micros = self._places, entries.counts[ENGINE_MICROS]
        place = np.array([places.setdefault(tenant, len(places)) for tenant, _ in entries.rows], np.int64)
        used = np.flatnonzero(micros)
        busy = np.zeros(len(used), BUSY)
        busy["place"], busy["day"], busy["micros"] = place[entries.row[used]], entries.day[used], micros[used]
        self._busy.append(busy)
        self._num_damaged += entries.num_damaged
        self._tokens += int(entries.counts[INPUT].sum() + entries.counts[OUTPUT].sum())

    def days(self) -> Iterator[tuple[date, MachineDay]]:
        busy = np.concatenate(self._busy)
        busy = busy[np.argsort(busy["day"], kind="stable")]
        ends = np.searchsorted(busy["day"], np.arange(1, len(self._running)))
        for day, seconds, of_day in zip(self.period.days, self._running, np.split(busy, ends), strict=True):
            micros = np.bincount(of_day["place"], of_day["micros"], len(self._places)).astype(np.int64)
            places = np.flatnonzero(micros)
            yield day, MachineDay(round(seconds * 1e6), micros[places], places)

    def bill(self) -> Row:
        """The bill by tenant and by day."""
        names, idle, running, rows_of_days = list(self._places), 0, 0, list[Row]()
        costs, used = np.zeros((2, len(names)), np.int64)
        for day, machine in self.days():
            parts, rest = machine.parts(self._price)
            rows_of_days.append(_day_row(day, machine, int(parts.sum()), rest))
            running, idle = running + machine.running, idle + rest
            used[machine.places] += machine.busy
            costs[machine.places] += parts
        busy = int(costs.sum())
        found = [one for one in zip(used.tolist(), names, costs.tolist(), strict=True) if one[0]]
        shown = nsmallest(MAX_ROWS, found, key=lambda one: (-one[0], one[1]))
        return {
            "from": self.period.first.isoformat(),
            "to": self.period.last.isoformat(),
            "price_per_hour": plain(self._price.amount),
            "currency": self._price.currency or None,
            "running_seconds": running / 1e6,
            "cost": _money(busy + idle),
            "idle_cost": _money(idle),
            "tokens": self._tokens,
            "cost_per_million_tokens": self._each(busy + idle),
            "cost_per_million_tokens_busy": self._each(busy),
            "rows": [
                {"tenant": name, "engine_seconds": micros / 1e6, "cost": _money(cost)} for micros, name, cost in shown
            ],
            "truncated": len(found) - len(shown),
            "days": rows_of_days,
            "damaged": self._num_damaged,
        }

    def csv(self) -> str:
        """A row for each day and tenant, and one of the day's idle time."""
        names = list(self._places)
        rows = [["day", "tenant", "engine_seconds", "cost", "currency"]]
        for day, machine in self.days():
            if not machine.running and not len(machine.busy):
                continue
            parts, rest = machine.parts(self._price)
            of_day = [names[place] for place in machine.places.tolist()], machine.busy.tolist(), parts.tolist()
            told = sorted(zip(*of_day, strict=True))
            rows += [
                [day.isoformat(), name, f"{used / 1e6:.6f}", _money(cost), self._price.currency]
                for name, used, cost in [*told, (IDLE, max(0, machine.running - int(machine.busy.sum())), rest)]
            ]
        return csv_text(rows)

    def _each(self, cost: int) -> str | None:
        """The cost of a million tokens, of prompts and of answers alike; None without any."""
        return _money(cost * MILLION // self._tokens) if self._tokens else None


class BillReader:
    """Makes one bill at a time, from the same ledgers as reports of usage."""

    def __init__(self, service: Service, price: MachinePrice | None) -> None:
        self._service = service
        self._price = price
        self._reading = asyncio.Lock()

    async def bill(self, query: Mapping[str, str]) -> Row:
        """The bill of a period: by tenant and by day. Raises `BadRequest` and `QuotaUnverifiable`."""
        async with self._read(query) as machine:
            return await asyncio.to_thread(machine.bill)

    async def csv(self, query: Mapping[str, str]) -> str:
        """A row for each day and tenant, and one of the day's idle time. Raises as `bill` does."""
        async with self._read(query) as machine:
            return await asyncio.to_thread(machine.csv)

    def begun(self, query: Mapping[str, str]) -> MachineTime | None:
        """The bill of a period, to which a report of usage adds the ledgers that it reads; None if there is no price of
        the machine, or the report is of one tenant: idle time is of none. Raises `BadRequest`.
        """
        if self._price is None or query.get("tenant"):
            return None
        period = UsagePeriod.of(query, datetime.now(UTC).date())
        return MachineTime(self._price, period, self._service.quotas.store.ledger)

    @asynccontextmanager
    async def _read(self, query: Mapping[str, str]) -> AsyncIterator[MachineTime]:
        if self._price is None:
            raise BadRequest("The price of the machine is not known: start with --machine-price, such as 3.50/h.")
        machine = self.begun(query)
        if machine is None:
            raise BadRequest("A bill is of all tenants, since idle time is of none: leave tenant out.", "tenant")
        period = machine.period
        async with self._reading:
            with explained(MAX_LEDGERS):
                await machine.begin()
                async for some in read_ledgers(self._service.quotas.store, *period.ledgers, MAX_LEDGERS):
                    entries = await asyncio.to_thread(entries_within, some, period.first, period.last)
                    await asyncio.to_thread(machine.add, entries)
            yield machine


def _day_row(day: date, machine: MachineDay, busy_cost: int, idle_cost: int) -> Row:
    return {
        "day": day.isoformat(),
        "running_seconds": machine.running / 1e6,
        "engine_seconds": int(machine.busy.sum()) / 1e6,
        "cost": _money(busy_cost + idle_cost),
        "idle_cost": _money(idle_cost),
    }


def _scaled(numbers: Micros, factor: int, divisor: int) -> Micros:
    """Each number times the factor, by the divisor, rounded down; products may exceed 64 bits."""
    if int(numbers.max(initial=0)) * factor >= 2**63:
        return np.array([number * factor // divisor for number in numbers.tolist()], np.int64)
    return numbers * factor // divisor


def _money(millionths: int) -> str:
    return plain(Decimal(millionths) / MILLION)
