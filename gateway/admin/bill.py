"""The machine's bill: its price by the hour, divided among tenants by engine time, and what was idle."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from heapq import nsmallest

import numpy as np

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
    def rate(self) -> tuple[int, int]:
        """The price in millionths, and the microseconds that it is of."""
        amount, parts = self.amount.as_integer_ratio()
        return amount * MILLION, parts * HOUR

    def of_time(self, microseconds: int) -> int:
        """The price of this time in millionths, rounded down."""
        amount, time = self.rate
        return microseconds * amount // time


@dataclass(slots=True)
class MachineDay:
    """Microseconds of one UTC day: for which machines ran, and of the engine for each tenant that had some."""

    running: int
    busy: list[int]
    places: list[int]  # of these tenants

    def parts(self, price: MachinePrice) -> list[int]:
        """The day's price in millionths for each tenant, and at last of idle time: together exactly the price of the
        time for which machines ran. Where tenants were charged for more time, such as that of compilers beside the
        engine, their parts shrink.
        """
        running, charged, (amount, time) = self.running, sum(self.busy), price.rate
        busy = self.busy if charged <= running else [running * used // charged for used in self.busy]
        parts = [used * amount // time for used in busy]
        return [*parts, price.of_time(running) - sum(parts)]


class MachineTime:
    """The time for which machines ran on the days of a period, the engine time of each tenant, and their tokens."""

    def __init__(self, price: MachinePrice, period: UsagePeriod, ledger: UsageLedger) -> None:
        self.period = period
        self._price = price
        self._ledger = ledger
        self._running: Sequence[float] = ()  # seconds of each day
        self._tokens = 0
        self._places = dict[str, int]()  # by tenant
        self._busy = [np.zeros(0, BUSY)]  # sparse: most of 100,000 tenants compute on few of 366 days

    async def begin(self) -> None:
        """Read for how long machines ran: beside the ledgers, or engine time could exceed it. Raises `QuotaError`."""
        self._running = await self._ledger.running(self.period.days)

    def add(self, entries: Entries) -> None:
        """Add the engine time and the tokens of some ledgers."""
        places, micros = self._places, entries.counts[:, ENGINE_MICROS]
        place = np.array([places.setdefault(tenant, len(places)) for tenant, _ in entries.rows], np.int64)
        used = np.flatnonzero(micros)
        busy = np.zeros(len(used), BUSY)
        busy["place"], busy["day"], busy["micros"] = place[entries.row[used]], entries.day[used], micros[used]
        self._busy.append(busy)
        self._tokens += int(entries.counts[:, [INPUT, OUTPUT]].sum())

    def days(self) -> Iterator[tuple[date, MachineDay]]:
        busy = np.concatenate(self._busy)
        busy = busy[np.argsort(busy["day"], kind="stable")]
        ends = np.searchsorted(busy["day"], np.arange(1, len(self._running)))
        for day, seconds, of_day in zip(self.period.days, self._running, np.split(busy, ends), strict=True):
            places, at = np.unique(of_day["place"], return_inverse=True)
            micros = np.zeros(len(places), np.int64)
            np.add.at(micros, at, of_day["micros"])
            yield day, MachineDay(round(seconds * 1e6), micros.tolist(), places.tolist())

    def bill(self) -> Row:
        """The bill by tenant and by day."""
        names = list(self._places)
        costs, used, idle, running, rows_of_days = [0] * len(names), [0] * len(names), 0, 0, list[Row]()
        for day, machine in self.days():
            parts = machine.parts(self._price)
            rows_of_days.append(_day_row(day, machine, parts))
            running, idle = running + machine.running, idle + parts[-1]
            for place, micros, cost in zip(machine.places, machine.busy, parts, strict=False):
                used[place] += micros
                costs[place] += cost
        busy = sum(costs)
        places = [place for place, micros in enumerate(used) if micros]
        shown = nsmallest(MAX_ROWS, places, key=lambda place: (-used[place], names[place]))
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
                {"tenant": names[place], "engine_seconds": used[place] / 1e6, "cost": _money(costs[place])}
                for place in shown
            ],
            "truncated": len(places) - len(shown),
            "days": rows_of_days,
        }

    def csv(self) -> str:
        """A row for each day and tenant, and one of the day's idle time."""
        names = list(self._places)
        rows = [["day", "tenant", "engine_seconds", "cost", "currency"]]
        for day, machine in self.days():
            if not machine.running and not machine.busy:
                continue
            *parts, rest = machine.parts(self._price)
            told = sorted(zip([names[place] for place in machine.places], machine.busy, parts, strict=True))
            rows += [
                [day.isoformat(), name, f"{used / 1e6:.6f}", _money(cost), self._price.currency]
                for name, used, cost in [*told, (IDLE, max(0, machine.running - sum(machine.busy)), rest)]
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


def _day_row(day: date, machine: MachineDay, parts: Sequence[int]) -> Row:
    return {
        "day": day.isoformat(),
        "running_seconds": machine.running / 1e6,
        "engine_seconds": sum(machine.busy) / 1e6,
        "cost": _money(sum(parts)),
        "idle_cost": _money(parts[-1]),
    }


def _money(millionths: int) -> str:
    return plain(Decimal(millionths) / MILLION)
