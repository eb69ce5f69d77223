import asyncio
from typing import Any

import pytest

from gateway.admin import diagnosis
from gateway.admin.diagnosis import HISTORY_SECONDS, STALE_SNAPSHOT_SECONDS, Diagnosis
from gateway.doctor.finding import Finding
from gateway.doctor.snapshot import WINDOW_SECONDS, Snapshot, Window
from tests.gateway.admin.clock import Clock

REAL_SLEEP = asyncio.sleep
ANSWERS: dict[str, Any] = {
    "overview": {"engine": {"kv_blocks": 1}},
    "tenants": {"tenants": []},
    "queue": {"waiting": []},
    "requests": {"live": []},
    "policy": {"effective": {"classes": {}}},
}


class Site:
    """A diagnosis on a clock that sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.compared: list[tuple[float, float]] = []
        self.looks = 0
        self.diagnosis = Diagnosis(self.read, self.metrics, self.clock)
        monkeypatch.setattr(diagnosis, "findings", self.findings)
        monkeypatch.setattr("gateway.admin.diagnosis.asyncio.sleep", self.sleep)

    async def read(self) -> dict[str, Any]:
        self.looks += 1
        return ANSWERS

    async def metrics(self) -> bytes:
        return b""

    async def sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def findings(self, before: Snapshot, after: Snapshot) -> list[Finding]:
        self.compared.append((before.at, after.at))
        return [Finding("slow", "It is slow", "3 s", "Wait")]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


async def test_the_first_answer_compares_two_moments(site: Site) -> None:
    (finding,) = (await site.diagnosis.report())["findings"]
    assert finding == {
        "name": "slow",
        "trouble": "It is slow",
        "evidence": "3 s",
        "remedy": "Wait",
        "severity": "warning",
    }
    assert site.compared == [(100.0, 100.0 + WINDOW_SECONDS)]


async def test_the_next_one_compares_with_the_last(site: Site) -> None:
    await site.diagnosis.report()
    site.clock.now = 120.0
    await site.diagnosis.report()
    assert site.compared[-1] == (100.0 + WINDOW_SECONDS, 120.0)
    assert site.looks == 3


async def test_an_answer_of_long_ago_is_nothing_to_compare_with(site: Site) -> None:
    await site.diagnosis.report()
    site.clock.now = 200.0 + STALE_SNAPSHOT_SECONDS
    await site.diagnosis.report()
    assert site.compared[-1] == (200.0 + STALE_SNAPSHOT_SECONDS, 200.0 + STALE_SNAPSHOT_SECONDS + WINDOW_SECONDS)


async def test_concurrent_questions_share_one_answer(site: Site) -> None:
    first, *others = await asyncio.gather(*(site.diagnosis.report() for _ in range(3)))
    assert others == [first, first]
    assert site.compared == [(100.0, 100.0 + WINDOW_SECONDS)]


async def test_moments_too_close_to_compare_are_not_compared(site: Site) -> None:
    await site.diagnosis.report()
    for seconds in (WINDOW_SECONDS - 0.5, 0.5):
        site.clock.now += seconds
        await site.diagnosis.report()
    assert site.compared[1:] == [(100.0 + WINDOW_SECONDS, 100.0 + 2 * WINDOW_SECONDS)]


async def test_findings_of_the_last_minutes_are_told_after_present_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, since = Site(monkeypatch), []

    def past(window: Window) -> list[Finding]:
        since.append(window.before.at)
        return [Finding("slow", "It was slow", "9 s", "Wait"), Finding("away", "It was away", "1", "See")]

    monkeypatch.setattr(diagnosis, "past_findings", past)
    await watched(site)
    found = (await site.diagnosis.report())["findings"]
    assert [(one["name"], one["trouble"]) for one in found] == [("slow", "It is slow"), ("away", "It was away")]
    assert 0 < site.clock.now - since[0] <= HISTORY_SECONDS


async def watched(site: Site) -> None:
    looks = asyncio.create_task(site.diagnosis.watch())
    while site.clock.now < 1000.0:  # the clock moves as the watch sleeps
        await REAL_SLEEP(0)
    looks.cancel()


async def test_the_last_minutes_are_told_by_the_oldest_metrics_within_them(site: Site) -> None:
    assert await site.diagnosis.history(60.0) == {"findings": [], "figures": []}, "nothing was kept yet"
    await watched(site)
    (steps,) = (await site.diagnosis.history(60.0))["figures"]
    assert steps["name"] == "steps" and "in 60 s" in steps["meaning"]


async def test_where_the_metrics_within_the_time_are_too_new_the_newest_before_them_tell(site: Site) -> None:
    await watched(site)
    kept = [at for at, _ in site.diagnosis._past]
    site.clock.now = kept[-1] + 1.0
    (steps,) = (await site.diagnosis.history(15.0))["figures"]
    assert "in 16 s" in steps["meaning"]
