"""Where requests are and what keeps them there, read off a real scheduler."""

import asyncio
from typing import Any

import pytest

from backend.scheduler.sequence import FinishReason
from gateway.admin.overview import QueueView, kv_map
from gateway.admin.rows import Reasons, State, state_of
from gateway.http.request_scope import RequestScope
from gateway.telemetry.request_record import RequestRecord
from quotas.policy.policy import DEFAULT_POLICY
from tests.gateway.admin.test_history import Site
from tests.gateway.telemetry.records import a_record


@pytest.fixture
def site() -> Site:
    return Site()


def reason(site: Site, record: RequestRecord) -> str | None:
    return Reasons(site.core.scheduler).of(record)


async def queue(site: Site) -> list[dict[str, object]]:
    listed = await QueueView(site.core.scheduler, Reasons(site.core.scheduler)).listed(
        site.telemetry.live, DEFAULT_POLICY, site.clock()
    )
    waiting: list[dict[str, object]] = listed["waiting"]
    return waiting


def test_a_request_passes_through_every_state(site: Site) -> None:
    assert state_of(a_record(body_read=None, timelines=[], settling=None)) is State.READING
    assert state_of(a_record(timelines=[], settling=None)) is State.RESERVING
    record = site.arrive("a", prompt=12, max_tokens=3)
    record.settling = None
    assert state_of(record) is State.WAITING
    site.step()
    assert state_of(record) is State.PREFILL
    site.step()
    assert state_of(record) is State.DECODING
    site.step()
    site.step()
    assert state_of(record) is State.ENDING
    assert state_of(a_record()) is State.ENDING


def test_who_is_next_and_who_is_behind_are_told_the_same_cause(site: Site) -> None:
    records = [site.arrive(name, prompt=2, max_tokens=4) for name in "abcdef"]
    assert reason(site, records[-1]) == "until the next step is planned"
    site.step()
    site.step()
    waiting = [record for record in records if record.timelines[0].admitted is None]
    said = {reason(site, record) for record in waiting}
    assert said == {"max_num_seqs sequences were running", "behind others, because max_num_seqs sequences were running"}
    assert all(reason(site, record) is None for record in records if record not in waiting)


def test_a_tenant_that_is_passed_over_is_told_its_own_limit(site: Site) -> None:
    site.core.allow("acme", 0, site.clock())
    record = site.arrive("a")
    assert site.core.schedule(site.clock()) is None
    assert reason(site, record) == "its tenant held as much KV memory as its limit allows"


def test_a_sequence_that_may_generate_no_more_for_now_is_paused(site: Site) -> None:
    record = site.arrive("a", prompt=4, max_tokens=8)
    record.timelines[0].sequence.limit_to(2)
    site.step()
    site.step()
    assert site.core.schedule(site.clock()) is None
    assert reason(site, record) == "paused: its tenant's token limit had no more for it yet"


async def test_a_client_that_does_not_read_is_named(site: Site) -> None:
    scope = RequestScope({}, _never, _unheard)
    record = a_record(scope=scope, timelines=[])
    assert reason(site, record) is None
    scope.writing_since = asyncio.get_running_loop().time() - 3.0
    assert str(reason(site, record)).startswith("its client reads slowly: a write has waited 3.")


async def _never() -> Any:
    raise AssertionError


async def _unheard(message: Any) -> None:
    raise AssertionError


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
