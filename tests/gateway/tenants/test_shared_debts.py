"""Debts that are shared over a store on paper, on a clock that moves when told."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from admission.admission import Admission
from admission.core import make_core
from backend.engine import Engine
from gateway.core import core_config
from gateway.settings.settings import Settings
from gateway.tenants import shared_debts
from gateway.tenants.shared_debts import SharedDebts, share_debts
from quotas.errors import StoreUnavailable
from quotas.store.redis_store import RedisStore
from quotas.store.served_sums import ServedElsewhere
from tests.gateway.paper_gateway import CONFIG, PaperExecutor


class Sums:
    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []
        self.elsewhere = ServedElsewhere({}, 1)
        self.is_away = False

    async def exchange(self, served: Mapping[str, float]) -> ServedElsewhere:
        self.told.append(dict(served))
        if self.is_away:
            raise StoreUnavailable("it does not answer")
        return self.elsewhere


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.sums = Sums()
        self.changes: list[tuple[dict[str, float], int]] = []
        self.debts = SharedDebts(self.sums, lambda: {"a": self.now}, self._changed, lambda: self.now)

    def _changed(self, served: Mapping[str, float], replicas: int) -> None:
        self.changes.append((dict(served), replicas))


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_the_core_hears_of_what_others_served(bench: Bench) -> None:
    await bench.debts.exchange()
    bench.sums.elsewhere = ServedElsewhere({"b": 2.0}, 3)
    await bench.debts.exchange()
    assert bench.changes == [({"b": 2.0}, 3)], "and of nothing else"
    assert bench.sums.told == [{"a": 100.0}] * 2
    assert (bench.debts.replicas, bench.debts.elsewhere) == (3, 2.0)


async def test_it_grows_stale_while_the_store_is_away(bench: Bench) -> None:
    bench.sums.is_away = True
    bench.now += 2.0
    with pytest.raises(StoreUnavailable):
        await bench.debts.exchange()
    assert bench.debts.staleness == 2.0
    assert not bench.changes
    bench.sums.is_away = False
    await bench.debts.exchange()
    assert bench.debts.staleness == 0.0


async def test_an_outage_ends_nothing_and_is_said_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.sums.is_away = True
    looked: list[float] = []

    async def sleep(seconds: float) -> None:
        looked.append(seconds)
        bench.sums.is_away, bench.sums.elsewhere = len(looked) in {1, 2, 5}, ServedElsewhere({}, 2)
        if len(looked) == 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(shared_debts.asyncio, "sleep", sleep)
    with caplog.at_level(logging.WARNING), suppress(asyncio.CancelledError):
        await bench.debts.run()
    assert len(caplog.records) == 2, "one for each outage"
    assert looked == [shared_debts.ALONE_SECONDS] * 3 + [shared_debts.PERIOD_SECONDS] * 4


@pytest.mark.parametrize(
    ("given", "shared"), [({}, True), ({"shared_debts": "off"}, False), ({"order": "fcfs"}, False)]
)
async def test_it_is_a_setting_and_only_the_fair_order_has_debts(given: dict[str, Any], shared: bool) -> None:
    settings = Settings(**given)
    core = make_core(core_config(settings), CONFIG)
    admission = Admission(Engine(core, PaperExecutor()), core)
    debts = share_debts(settings, RedisStore.at("redis://127.0.0.1:1"), admission, core)
    assert (debts is not None) is shared
