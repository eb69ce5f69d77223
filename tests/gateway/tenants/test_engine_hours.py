import asyncio
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.background import ITEMS_PER_TURN
from gateway.tenants.engine_hours import EngineHours
from quotas.errors import StoreFault, StoreUnavailable
from quotas.reservation import Usage
from quotas.usage_row import NO_KEY


class Ledger:
    def __init__(self) -> None:
        self.engine: dict[str, float] = {}
        self.running: dict[date, float] = {}
        self.is_away = False
        self.damaged: date | None = None

    def add(self, tenant: str, row: str, usage: Usage) -> None:
        assert (row, usage.requests) == (NO_KEY, 0)
        self.engine[tenant] = self.engine.get(tenant, 0.0) + usage.engine_seconds

    async def book_running(self, day: date, seconds: float) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
        if day == self.damaged:
            raise StoreFault("WRONGTYPE")
        self.running[day] = seconds


def account(charged: float) -> Any:
    return SimpleNamespace(charged=charged)


async def test_engine_time_is_booked_once_and_hours_by_the_day() -> None:
    ledger, now, day = Ledger(), 100.0, date(2026, 1, 1)
    served, spare = {"a": account(1.0)}, {"a": account(0.25)}
    hours = EngineHours([served, spare], ledger, lambda: now, lambda: day)
    now = 110.0
    await hours.book()
    served["a"].charged, served["b"] = 1.5, account(2.0)
    now, day = 115.0, date(2026, 1, 2)
    await hours.book()  # what ran since the last time is of the day that it began in
    now = 116.0
    served["a"].charged = 1.4  # a correction
    await hours.book()
    assert ledger.engine == pytest.approx({"a": 1.75, "b": 2.0})
    assert ledger.running == {date(2026, 1, 1): 15.0, date(2026, 1, 2): 1.0}


async def test_hours_during_an_outage_are_booked_after_it() -> None:
    ledger, now = Ledger(), 0.0
    hours = EngineHours([{}], ledger, lambda: now, lambda: date(2026, 1, 1))
    ledger.is_away, now = True, 5.0
    with pytest.raises(StoreUnavailable):
        await hours.book()
    ledger.is_away, now = False, 7.0
    await hours.book()
    assert ledger.running == {date(2026, 1, 1): 7.0}


async def test_a_damaged_day_is_told_and_does_not_keep_the_next_from_being_booked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger, now, day = Ledger(), 0.0, date(2026, 1, 1)
    hours = EngineHours([{}], ledger, lambda: now, lambda: day)
    ledger.damaged, now = day, 5.0
    await hours.book()
    now, day = 7.0, date(2026, 1, 2)
    await hours.book()
    now = 8.0
    await hours.book()
    assert ledger.running == {date(2026, 1, 2): 1.0}
    assert len(caplog.messages) == 1 and "running time of 2026-01-01" in caplog.text


async def test_other_tasks_take_turns_with_the_booking_of_many_tenants() -> None:
    many, turns = {f"t{n}": account(1.0) for n in range(5 * ITEMS_PER_TURN)}, 0
    hours = EngineHours([many], Ledger(), lambda: 0.0, lambda: date(2026, 1, 1))

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await hours.book()
    task.cancel()
    assert turns >= 4
