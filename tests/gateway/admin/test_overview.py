import pytest

from backend.scheduler.sequence import FinishReason
from gateway.admin.overview import QueueView, kv_map
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


async def test_the_map_names_the_owner_of_every_block(site: Site) -> None:
    site.arrive("a", prompt=8)
    site.arrive("b", prompt=4)
    site.step()
    site.step()
    scheduler = site.core.scheduler
    shown = await kv_map(scheduler, 8)
    owners = [owner for owner, blocks in shown["runs"] for _ in range(blocks)]
    held = {block for s in scheduler.running.values() for block in s.block_table}
    assert len(owners) == shown["num_blocks"] == scheduler.config.num_blocks
    assert {block for block, owner in enumerate(owners) if owner >= 0} == held
    assert (shown["owners"], shown["block_bytes"], shown["block_tokens"]) == (["acme"], 8, 4)


async def test_blocks_of_one_that_was_cut_short_stay_its_own_until_the_step_is_over(site: Site) -> None:
    record = site.arrive("a", prompt=8)
    assert site.core.schedule(site.clock()) is not None
    site.core.finish(record.timelines[0].sequence, FinishReason.CANCELLED, site.clock())
    scheduler = site.core.scheduler
    used = scheduler.config.num_blocks - scheduler.pool.num_free
    runs = (await kv_map(scheduler, 8))["runs"]
    assert sum(blocks for owner, blocks in runs if owner == 0) == used > 0


async def test_an_empty_pool_is_one_run(site: Site) -> None:
    assert (await kv_map(site.core.scheduler, 8))["runs"] == [[-1, 12]]
