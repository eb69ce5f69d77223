"""The machine's bill: its price by the hour, divided among tenants by engine time, and what was idle."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from heapq import nsmallest
from operator import add

import numpy as np

from gateway.admin.rows import MAX_ROWS, Row
from gateway.admin.usage import MAX_LEDGERS, UsagePeriod, explained
from gateway.api.service import Service
from gateway.errors import BadRequest
from gateway.table import csv_text
from gateway.tenants.usage import plain, read_ledgers
from gateway.tenants.usage_sums import ENGINE_MICROS, INPUT, OUTPUT, Counts, Entries, entries_within, grown
from quotas.store.usage_ledger import LedgerRows

HOUR = 3_600_000_000  # microseconds
MILLION = 1_000_000  # money is counted in millionths
IDLE = "(idle)"


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
    """Microseconds of one UTC day: for which machines ran, and of the engine for each tenant."""

    running: int
    busy: list[int]

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

    def __init__(self, price: MachinePrice, period: UsagePeriod, running: Sequence[float]) -> None:
        """`running`: the seconds of each day."""
        self.period = period
        self._price = price
        self._running = running
        self._tokens = 0
        self._places = dict[str, int]()  # by tenant
        self._busy: Counts = np.zeros((0, len(running)), np.int64)  # [num_tenants, num_days], microseconds

    def add(self, entries: Entries) -> None:
        """Add the engine time and the tokens of some ledgers."""
        places, num_days = self._places, len(self._running)
        place = np.array([places.setdefault(tenant, len(places)) for tenant, _ in entries.rows], np.int64)
        self._busy = grown(self._busy, len(places))
        at = place[entries.row] * num_days + entries.day
        np.add.at(self._busy.reshape(-1), at, entries.counts[:, ENGINE_MICROS])
        self._tokens += int(entries.counts[:, [INPUT, OUTPUT]].sum())

    def add_ledgers(self, ledgers: Iterable[LedgerRows]) -> None:
        self.add(entries_within(ledgers, self.period.first, self.period.last))

    def days(self) -> tuple[list[str], dict[date, MachineDay]]:
        """The tenants by name, and the days with the time of each of them."""
        names = sorted(self._places)
        order = np.array([self._places[name] for name in names], np.int64)
        found = dict[date, MachineDay]()
        for number, seconds in enumerate(self._running):
            of_day = self._busy[order, number].tolist()  # of all days at once, it would keep other threads waiting
            found[self.period.first + timedelta(days=number)] = MachineDay(round(seconds * 1e6), of_day)
        return names, found

    def bill(self) -> Row:
        """The bill by tenant and by day."""
        names, days = self.days()
        costs, used, rows_of_days = [0] * (len(names) + 1), [0] * len(names), list[Row]()
        for day, machine in days.items():
            parts = machine.parts(self._price)
            rows_of_days.append(_day_row(day, machine, parts))
            costs = list(map(add, costs, parts))
            used = list(map(add, used, machine.busy))
        idle = costs.pop()
        busy = sum(costs)
        places = [place for place, micros in enumerate(used) if micros]
        shown = nsmallest(MAX_ROWS, places, key=lambda place: (-used[place], names[place]))
        return {
            "from": self.period.first.isoformat(),
            "to": self.period.last.isoformat(),
            "price_per_hour": plain(self._price.amount),
            "currency": self._price.currency or None,
            "running_seconds": sum(machine.running for machine in days.values()) / 1e6,
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
        names, days = self.days()
        rows = [["day", "tenant", "engine_seconds", "cost", "currency"]]
        for day, machine in days.items():
            idle = max(0, machine.running - sum(machine.busy))
            told = list(zip((*names, IDLE), (*machine.busy, idle), machine.parts(self._price), strict=True))
            shown = [*(one for one in told[:-1] if one[1]), told[-1]] if machine.running or any(machine.busy) else []
            rows += [
                [day.isoformat(), name, f"{used / 1e6:.6f}", _money(cost), self._price.currency]
                for name, used, cost in shown
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
        return await asyncio.to_thread((await self._read(query)).bill)

    async def csv(self, query: Mapping[str, str]) -> str:
        """A row for each day and tenant, and one of the day's idle time. Raises as `bill` does."""
        return await asyncio.to_thread((await self._read(query)).csv)

    async def begun(self, query: Mapping[str, str]) -> MachineTime | None:
        """The bill of a period, to which a report of usage adds the ledgers that it reads; None if there is no price of
        the machine, or the report is of one tenant: idle time is of none. Raises as `bill` does.
        """
        if self._price is None or query.get("tenant"):
            return None
        period = UsagePeriod.of(query, datetime.now(UTC).date())
        days = [period.first + timedelta(days=number) for number in range((period.last - period.first).days + 1)]
        with explained(MAX_LEDGERS):
            return MachineTime(self._price, period, await self._service.quotas.store.ledger.running(days))

    async def _read(self, query: Mapping[str, str]) -> MachineTime:
        if self._price is None:
            raise BadRequest("The price of the machine is not known: start with --machine-price, such as 3.50/h.")
        machine = await self.begun(query)
        if machine is None:
            raise BadRequest("A bill is of all tenants, since idle time is of none: leave tenant out.", "tenant")
        async with self._reading:
            with explained(MAX_LEDGERS):
                async for some in read_ledgers(self._service.quotas.store, *machine.period.ledgers, MAX_LEDGERS):
                    await asyncio.to_thread(machine.add_ledgers, some)
        return machine


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
