from typing import Any

import pytest

from backend.scheduler.scheduled_step import WaitReason
from gateway.admin.kv_map import kv_map
from gateway.admin.overview import QueueView
from gateway.admin.rows import Reasons
from tests.gateway.admin.test_history import Site


@pytest.fixture
def site() -> Site:
    return Site()


async def queue(site: Site) -> list[dict[str, object]]:
    view = QueueView(site.core.scheduler, Reasons(site.core.scheduler))
    listed = await view.listed(site.telemetry.live, site.clock())
    waiting: list[dict[str, object]] = listed["waiting"]
    return waiting


def arrive(site: Site, name: str, **fields: Any) -> None:
    record = site.arrive(name, prompt=2, **fields)
    record.request_id = name


async def test_the_queue_shows_what_is_due_first_and_what_is_passed_over_last(site: Site) -> None:
    for name in "abcd":
        arrive(site, name)
    site.step()
    site.step()
    for name, first_token_by in (("late", 9.0), ("soon", 3.0), ("held", 1.0)):
        arrive(site, name, tenant="other" if name == "held" else "acme", first_token_by=site.clock() + first_token_by)
    site.clock.now += 0.01
    site.core.scheduler.held_tenants["other"] = WaitReason.ALLOWANCE
    listed = await queue(site)
    assert [row["id"] for row in listed] == ["soon", "late", "held"]
    assert {row["prompt_tokens"] for row in listed} == {2}
    assert [row["waited"] for row in listed] == pytest.approx([0.01] * 3)


async def test_asking_changes_no_decision(site: Site) -> None:
    other = Site()
    for one in (site, other):
        for name in "abcdef":
            one.arrive(name, prompt=3, max_tokens=6)
    for _ in range(12):
        await queue(site)
        await kv_map(site.core.scheduler, 8)
        for one in (site, other):
            one.step()
        ours, theirs = site.core.scheduler, other.core.scheduler
        assert list(ours.running) == list(theirs.running)
        assert [s.block_table.blocks for s in ours.running.values()] == [
            s.block_table.blocks for s in theirs.running.values()
        ]
