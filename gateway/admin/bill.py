"""The machine's bill: its price by the hour, divided among tenants by engine time, and what was idle."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, Context, Decimal, localcontext

import numpy as np

from gateway.admin.rows import MAX_ROWS, Row
from gateway.admin.usage import MAX_LEDGERS, UsagePeriod, explained
from gateway.api.service import Service
from gateway.errors import BadRequest
from gateway.table import csv_text
from gateway.tenants.usage import EXACT, plain, read_sums
from gateway.tenants.usage_sums import ENGINE_MICROS, INPUT, OUTPUT, entry_array
from quotas.policy.limit import EPOCH
from quotas.store.usage_ledger import TenantLedgers

HOUR = 3_600_000_000  # microseconds
ROUNDED = Context(prec=60, rounding=ROUND_FLOOR)
MILLIONTH = Decimal("0.000001")
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

    def of_time(self, microseconds: int) -> Decimal:
        """The price of this time, rounded down to a millionth."""
        with localcontext(ROUNDED):
            return (self.amount * microseconds / HOUR).quantize(MILLIONTH)


@dataclass(slots=True)
class MachineDay:
    """Microseconds of one UTC day: for which machines ran, and of the engine by tenant."""

    running: int
    busy: dict[str, int]

    def parts(self, price: MachinePrice) -> dict[str, Decimal]:
        """The day's price by tenant, and of `IDLE`: together exactly the price of the time for which machines ran.
        Where tenants were charged for more time, such as that of compilers beside the engine, their parts shrink.
        """
        whole, busy = price.of_time(self.running), sum(self.busy.values())
        most = max(self.running, busy, 1)
        with localcontext(EXACT):
            parts = {name: price.of_time(self.running * used // most) for name, used in sorted(self.busy.items())}
            return parts | {IDLE: whole - sum(parts.values(), Decimal())}


class BillReader:
    """Makes one bill at a time, from the same ledgers as reports of usage."""

    def __init__(self, service: Service, price: MachinePrice | None) -> None:
        self._service = service
        self._price = price
        self._reading = asyncio.Lock()

    @property
    def is_priced(self) -> bool:
        """True if the price of the machine is known."""
        return self._price is not None

    async def bill(self, query: Mapping[str, str]) -> Row:
        """The bill of a period: by tenant and by day. Raises `BadRequest` and `QuotaUnverifiable`."""
        period, price = self._asked(query)
        days, tokens = await self._read(period)
        return await asyncio.to_thread(_bill, period, price, days, tokens)

    async def csv(self, query: Mapping[str, str]) -> str:
        """A row for each day and tenant, and one of the day's idle time. Raises as `bill` does."""
        period, price = self._asked(query)
        days, _ = await self._read(period)
        return await asyncio.to_thread(_csv, price, days)

    def _asked(self, query: Mapping[str, str]) -> tuple[UsagePeriod, MachinePrice]:
        if self._price is None:
            raise BadRequest("The price of the machine is not known: start with --machine-price, such as 3.50/h.")
        if query.get("tenant"):
            raise BadRequest("A bill is of all tenants, since idle time is of none: leave tenant out.", "tenant")
        return UsagePeriod.of(query, datetime.now(UTC).date()), self._price

    async def _read(self, period: UsagePeriod) -> tuple[dict[date, MachineDay], int]:
        """The machines' days, and all tokens."""
        names = [period.first + timedelta(days=number) for number in range((period.last - period.first).days + 1)]
        store, tokens = self._service.quotas.store, 0
        async with self._reading:
            with explained(MAX_LEDGERS):
                running = await store.ledger.running(names)
                days = {day: MachineDay(round(s * 1e6), {}) for day, s in zip(names, running, strict=True)}
                async for some in read_sums(store, None, period.first, period.last, MAX_LEDGERS):
                    tokens += await asyncio.to_thread(_add, days, some)
        return days, tokens


def _add(days: Mapping[date, MachineDay], some: Sequence[TenantLedgers]) -> int:
    """Add the engine time in ledgers to their days; returns their tokens."""
    tokens = 0
    for one in some:
        entries = entry_array([one])
        counts = entries["counts"].astype(np.int64)
        tokens += int(counts[:, [INPUT, OUTPUT]].sum())
        for number, micros in zip(entries["day"].tolist(), counts[:, ENGINE_MICROS].tolist(), strict=True):
            if micros:
                busy = days[EPOCH + timedelta(days=number)].busy
                busy[one.tenant] = busy.get(one.tenant, 0) + micros
    return tokens


def _bill(period: UsagePeriod, price: MachinePrice, days: Mapping[date, MachineDay], tokens: int) -> Row:
    costs, seconds = dict[str, Decimal](), dict[str, int]()
    rows_of_days = []
    with localcontext(EXACT):
        for day, machine in days.items():
            parts = machine.parts(price)
            for tenant, cost in parts.items():
                costs[tenant] = costs.get(tenant, Decimal()) + cost
            for tenant, used in machine.busy.items():
                seconds[tenant] = seconds.get(tenant, 0) + used
            rows_of_days.append(_day_row(day, machine, parts))
        idle = costs.pop(IDLE, Decimal())
        busy = sum(costs.values(), Decimal())
    shown = sorted(seconds, key=lambda tenant: (-seconds[tenant], tenant))
    return {
        "from": period.first.isoformat(),
        "to": period.last.isoformat(),
        "price_per_hour": plain(price.amount),
        "currency": price.currency or None,
        "running_seconds": sum(machine.running for machine in days.values()) / 1e6,
        "cost": plain(busy + idle),
        "idle_cost": plain(idle),
        "tokens": tokens,
        "cost_per_million_tokens": _each(busy + idle, tokens),
        "cost_per_million_tokens_busy": _each(busy, tokens),
        "rows": [
            {"tenant": tenant, "engine_seconds": seconds[tenant] / 1e6, "cost": plain(costs[tenant])}
            for tenant in shown[:MAX_ROWS]
        ],
        "truncated": max(0, len(shown) - MAX_ROWS),
        "days": rows_of_days,
    }


def _day_row(day: date, machine: MachineDay, parts: Mapping[str, Decimal]) -> Row:
    return {
        "day": day.isoformat(),
        "running_seconds": machine.running / 1e6,
        "engine_seconds": sum(machine.busy.values()) / 1e6,
        "cost": plain(sum(parts.values(), Decimal())),
        "idle_cost": plain(parts[IDLE]),
    }


def _each(cost: Decimal, tokens: int) -> str | None:
    """The cost of a million tokens, of prompts and of answers alike; None without any."""
    with localcontext(ROUNDED):
        return plain((cost * 1_000_000 / tokens).quantize(MILLIONTH)) if tokens else None


def _csv(price: MachinePrice, days: Mapping[date, MachineDay]) -> str:
    rows = [["day", "tenant", "engine_seconds", "cost", "currency"]]
    for day, machine in days.items():
        idle = max(0, machine.running - sum(machine.busy.values()))
        for tenant, cost in machine.parts(price).items() if machine.running or machine.busy else ():
            used = idle if tenant == IDLE else machine.busy[tenant]
            rows.append([day.isoformat(), tenant, f"{used / 1e6:.6f}", plain(cost), price.currency])
    return csv_text(rows)
