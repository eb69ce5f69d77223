import pytest

from gateway.admin.kv_map import kv_map
from gateway.admin.overview import QueueView
from gateway.admin.rows import Reasons
from quotas.policy.policy import DEFAULT_POLICY
from tests.gateway.admin.test_history import Site


@pytest.fixture
def site() -> Site:
    return Site()


async def queue(site: Site) -> list[dict[str, object]]:
    listed = await QueueView(site.core.scheduler, Reasons(site.core.scheduler)).listed(
        site.telemetry.live, DEFAULT_POLICY, site.clock()
    )
    waiting: list[dict[str, object]] = listed["waiting"]
    return waiting


async def test_the_queue_shows_who_is_next_first_and_who_is_passed_over_last(site: Site) -> None:
    for name in "abcdef":
        site.arrive(name, prompt=2).request_id = name
    site.step()
    site.step()
    site.core.scheduler.held_tenants["acme"] = site.core.scheduler.wait_reason  # type: ignore[assignment]
    listed = await queue(site)
    assert [row["id"] for row in listed] == ["e", "f"]
    assert {row["prompt_tokens"] for row in listed} == {2}
    assert [row["waited"] for row in listed] == pytest.approx([0.02, 0.02])


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
        assert [s.block_table for s in ours.running.values()] == [s.block_table for s in theirs.running.values()]
