import pytest

from backend.paged_kv.block_names import BlockName
from backend.scheduler.sequence import FinishReason
from gateway.admin.kv_map import Use, kv_map
from tests.gateway.admin.test_history import Site
from tests.gateway.telemetry.metrics_rig import Rig

NAMES = [BlockName(ordinal) for ordinal in range(9)]


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def rig() -> Rig:
    return Rig(num_blocks=12, num_host_blocks=2)


async def uses(rig: Rig) -> list[tuple[str, Use]]:
    """Whose each block is that is not free, and what it is used for."""
    shown = await kv_map(rig.core.scheduler, 8)
    return sorted(
        (shown["owners"][owner], Use(use)) for owner, blocks, use in shown["runs"] for _ in range(blocks) if owner >= 0
    )


async def test_the_map_names_the_owner_of_every_block(site: Site) -> None:
    site.arrive("a", prompt=8)
    site.arrive("b", prompt=4)
    site.step()
    site.step()
    scheduler = site.core.scheduler
    shown = await kv_map(scheduler, 8)
    owners = [owner for owner, blocks, _ in shown["runs"] for _ in range(blocks)]
    held = {block for s in scheduler.running.values() for block in s.block_table.blocks}
    assert len(owners) == shown["num_blocks"] == scheduler.config.num_blocks
    assert {block for block, owner in enumerate(owners) if owner >= 0} == held
    assert (shown["owners"], shown["block_bytes"], shown["block_tokens"]) == (["acme"], 8, 4)


async def test_blocks_of_a_cut_sequence_stay_its_own_until_the_step_is_over(site: Site) -> None:
    record = site.arrive("a", prompt=8)
    assert site.core.schedule(site.clock()) is not None
    site.core.finish_sequence(record.engine.timelines[0].sequence, FinishReason.CANCELLED, site.clock())
    scheduler = site.core.scheduler
    used = scheduler.config.num_blocks - scheduler.kv_manager.pool.num_free
    runs = (await kv_map(scheduler, 8))["runs"]
    assert sum(blocks for owner, blocks, _ in runs if owner == 0) == used > 0


async def test_an_empty_pool_is_one_run(site: Site) -> None:
    assert (await kv_map(site.core.scheduler, 8))["runs"] == [[-1, 12, 0]]


async def test_shared_and_idle_blocks_are_told_apart(rig: Rig) -> None:
    rig.arrive("a", prompt=9, max_tokens=8, names=NAMES[:2])
    rig.step()
    rig.step()
    rig.arrive("b", prompt=9, max_tokens=20, tenant="zeta", names=NAMES[:2])
    rig.step()
    assert await uses(rig) == [("acme", Use.HELD), ("acme", Use.SHARED), ("acme", Use.SHARED), ("zeta", Use.HELD)]
    rig.run()
    assert await uses(rig) == [("zeta", Use.CACHED), ("zeta", Use.CACHED)]


async def test_pinned_blocks_are_told_apart_from_idle_ones(rig: Rig) -> None:
    rig.core.pin_prefixes("acme", NAMES[:2], rig.now)
    rig.arrive("a", prompt=12, max_tokens=2, names=NAMES[:3])
    rig.run()
    assert await uses(rig) == [("acme", Use.CACHED), ("acme", Use.PINNED), ("acme", Use.PINNED)]


async def test_floored_and_host_blocks_are_counted_by_tenant(rig: Rig) -> None:
    rig.core.limit_cache("acme", 1, None, rig.now)
    rig.arrive("a", prompt=20, max_tokens=2, names=NAMES[:5])
    rig.run()
    rig.arrive("b", prompt=40, max_tokens=2, tenant="zeta")
    rig.run()
    shown = await kv_map(rig.core.scheduler, 8)
    assert shown["kept"] == {"acme": 1}
    assert (shown["swapped"], shown["host_blocks"]) == ({"acme": 2}, 2)
