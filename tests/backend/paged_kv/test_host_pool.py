"""Host blocks go by tenant: a flood drives out its own, floors hold, and what nobody asks for goes in the end."""

from collections import Counter
from itertools import count
from random import Random

import pytest

from backend.paged_kv.host_pool import STALE_POOL_FILLS, HostPool
from backend.paged_kv.prefix_cache import BlockName
from tests.examples import examples


class Stored:
    """A pool whose copies are made at once."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = HostPool(num_blocks)
        self.names: list[BlockName] = []
        self._numbers = count()

    def store(self, tenant: str) -> str | None:
        """Let a tenant have one more; returns whose block was given up."""
        name = BlockName(next(self._numbers))
        host_block, given_up = self.pool.store(name, tenant, completed_step=0)
        assert host_block is not None
        host_block.written = 0
        self.names.append(name)
        return None if given_up is None else given_up.tenant

    def store_many(self, tenant: str, blocks: int) -> None:
        for _ in range(blocks):
            self.store(tenant)


def test_a_flood_drives_out_its_own() -> None:
    stored = Stored(100)
    stored.store_many("a", 40)
    stored.store_many("b", 20)
    stored.store_many("flood", 500)
    assert stored.pool.held == {"a": 40, "b": 20, "flood": 40}, "the tenant with the most gives way, the newcomer first"
    stored.store_many("c", 30)
    assert stored.pool.held == {"a": 26, "b": 20, "flood": 27, "c": 27}


def test_one_tenant_alone_has_all_of_it_and_its_least_recently_used_go() -> None:
    stored = Stored(10)
    stored.store_many("a", 10)
    first = stored.pool.named(stored.names[0])
    assert first is not None
    stored.pool.used(first)
    stored.store_many("a", 5)
    assert [stored.pool.named(name) is None for name in stored.names] == [False, *[True] * 5, *[False] * 9]


def test_a_floor_holds_for_the_tenant_with_the_most() -> None:
    stored = Stored(100)
    stored.pool.limit("a", 60)
    stored.store_many("a", 100)
    stored.store_many("b", 200)
    assert stored.pool.held == {"a": 80, "b": 20}, "20 each beyond the floor"
    stored.pool.limit("a", 0)
    stored.store_many("b", 100)
    assert stored.pool.held == {"a": 50, "b": 50}


def test_a_tenant_that_stays_away_loses_its_share_of_the_host() -> None:
    stored = Stored(10)
    stored.pool.limit("floor", 2)
    stored.store_many("gone", 3)
    stored.store_many("floor", 3)
    stored.store_many("a", STALE_POOL_FILLS * 10 - 6)
    assert stored.pool.held == {"gone": 3, "floor": 3, "a": 4}
    stored.store_many("a", 20)
    assert stored.pool.held == {"floor": 2, "a": 8}


def test_a_host_block_stays_while_a_step_in_flight_may_copy_it() -> None:
    pool = HostPool(1)
    host_block, _ = pool.store(BlockName(1), "a", completed_step=0)
    assert host_block is not None
    assert pool.store(BlockName(2), "a", completed_step=0) == (None, None), "its copy is not planned yet"
    host_block.written = 1
    assert pool.store(BlockName(2), "b", completed_step=0) == (None, None)
    assert pool.store(BlockName(2), "b", completed_step=1)[1] is host_block
    assert HostPool(0).store(BlockName(3), "a", completed_step=9) == (None, None)


@pytest.mark.parametrize("seed", range(examples(20)))
def test_nobody_below_its_floor_or_with_less_than_others_gives_way_to_them(seed: int) -> None:
    """But for what the pool was filled eight times over without."""
    random = Random(seed)
    stored = Stored(random.randint(4, 40))
    pool, floors = stored.pool, Counter[str]()
    tenants = [f"t{n}" for n in range(random.randint(1, 6))]
    for moment in range(600):
        if random.random() < 0.02:
            tenant = random.choice(tenants)
            others = floors.total() - floors[tenant]
            floors[tenant] = random.randint(0, max(0, pool.num_blocks - others) // 2)
            pool.limit(tenant, floors[tenant])
        if stored.names and random.random() < 0.3 and (found := pool.named(random.choice(stored.names))):
            pool.used(found)
        tenant = random.choice(tenants if moment % 200 < 150 else tenants[:1])
        before, oldest = Counter(pool.held), min((one.used for one in pool._by_name.values()), default=0)
        is_stale = pool._stored - oldest > STALE_POOL_FILLS * pool.num_blocks
        loser = stored.store(tenant)
        if loser is not None:
            excess = {one: before[one] - floors[one] for one in before}
            assert before.total() == pool.num_blocks, "one was given up while there was room"
            assert loser == tenant or excess[loser] > 0, "a floor gave way to another tenant"
            assert is_stale or excess[loser] == max(excess.values()), "another had more"
        pool.check_integrity()
