"""Leases on KV memory, over a store and an engine on paper and a clock that moves when told."""

import asyncio
from collections.abc import Iterable

import pytest

from gateway.tenants.kv_leases import IDLE_SECONDS, RENEW_SECONDS, KvLeases
from quotas.errors import NotSent, StoreFault
from tests.interrupted import assert_ends_when_cancelled

BLOCK = 1024


class Pool:
    """What all replicas lease of one tenant's limit."""

    def __init__(self) -> None:
        self.others = 0
        self.calls = 0
        self.is_away = False

    async def lease_kv(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        self.calls += 1
        if self.is_away:
            raise NotSent("away")
        return max(0, min(wanted, limit - self.others)), 30.0


class Engine:
    def __init__(self) -> None:
        self.allowed: dict[str, int | None] = {}
        self.needs = 0
        self.denied = False
        self.may_need: dict[str, list[int]] = {}  # blocks of each sequence, by tenant

    def allow(self, tenant: str, blocks: int | None) -> None:
        self.allowed[tenant] = blocks
        self.denied = False

    def demand(self, tenant: str) -> int:
        return self.needs

    def is_denied(self, tenant: str) -> bool:
        return self.denied

    def longest_of(self, tenants: Iterable[str]) -> dict[str, int]:
        return {tenant: max(self.may_need.get(tenant, ()), default=0) for tenant in tenants}


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.pool, self.engine = Pool(), Engine()
        self.leases = KvLeases(self.pool, self.engine, BLOCK, lambda: self.now)

    async def nonsense(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        raise StoreFault("nonsense")

    async def lease(self, blocks: int = 64, wanted: int = 8) -> int | None:
        self.leases.use("acme", blocks * BLOCK, wanted)
        return await self.after(0)

    async def after(self, seconds: float) -> int | None:
        self.now += seconds
        await self.leases.renew_due()
        return self.engine.allowed.get("acme")


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_renewing_ends_with_its_server_also_in_the_turn_in_which_a_lease_is_wanted(bench: Bench) -> None:
    await bench.lease()
    bench.leases._wake.clear()
    await assert_ends_when_cancelled(bench.leases.run(), bench.leases._wake)


async def test_a_tenant_without_a_limit_needs_no_lease(bench: Bench) -> None:
    bench.leases.use("acme", None, 10)
    assert await bench.after(1) is None
    assert bench.pool.calls == 0 and not bench.engine.allowed


async def test_a_tenant_with_a_limit_holds_nothing_until_it_is_leased(bench: Bench) -> None:
    bench.leases.use("acme", 64 * BLOCK, 8)
    assert bench.engine.allowed == {"acme": 0}
    assert await bench.after(0) == 10  # and some headroom


async def test_a_lease_follows_demand_and_never_exceeds_the_limit(bench: Bench) -> None:
    await bench.lease()
    bench.engine.needs = 40
    assert await bench.after(RENEW_SECONDS) == 50
    bench.engine.needs = 400
    assert await bench.after(RENEW_SECONDS) == 64


async def test_denied_blocks_are_asked_for_at_once_and_blocks_of_others_a_little_later(bench: Bench) -> None:
    await bench.lease()
    bench.engine.needs, bench.engine.denied = 20, True
    assert await bench.after(0.02) == 25
    bench.pool.others, bench.engine.needs, bench.engine.denied = 44 * BLOCK, 30, True
    assert await bench.after(0.02) == 20
    calls, bench.engine.denied = bench.pool.calls, True
    await bench.after(0.02)
    assert bench.pool.calls == calls
    await bench.after(0.2)
    assert bench.pool.calls == calls + 1


async def test_an_outage_leaves_the_lease_until_it_expires(bench: Bench) -> None:
    bench.engine.needs = 8
    await bench.lease()
    bench.pool.is_away = True
    assert await bench.after(29) == 10
    assert await bench.after(2) == 0
    bench.pool.is_away = False
    assert await bench.after(RENEW_SECONDS) == 10


async def test_a_tenant_that_idles_in_an_outage_has_its_lease_when_it_comes_back(bench: Bench) -> None:
    bench.engine.needs = 40
    await bench.lease()
    bench.pool.is_away, bench.engine.needs = True, 0
    assert await bench.after(RENEW_SECONDS) == 50


@pytest.mark.parametrize("tried", [0.0, 0.02, 0.5, 0.98])
async def test_a_lease_ends_on_time_whenever_a_renewal_was_tried_last(bench: Bench, tried: float) -> None:
    bench.engine.needs = 8
    await bench.lease()
    bench.pool.is_away = True
    assert await bench.after(29 + tried) == 10
    assert await bench.after(1 - tried) == 0


async def test_what_is_given_back_is_used_no_more_when_the_store_hears_of_it(bench: Bench) -> None:
    bench.engine.needs = 40
    await bench.lease()
    bench.engine.needs, allowed = 8, list[int | None]()

    async def lease_kv(tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        allowed.append(bench.engine.allowed[tenant])
        return await Pool.lease_kv(bench.pool, tenant, limit, wanted)

    bench.pool.lease_kv = lease_kv  # type: ignore[method-assign]
    assert await bench.after(RENEW_SECONDS) == 10
    bench.engine.needs = 40
    assert await bench.after(RENEW_SECONDS) == 50
    assert allowed == [10, 10]


async def test_an_edited_limit_is_taken_up_with_the_next_request(bench: Bench) -> None:
    bench.engine.needs = 40
    await bench.lease()
    assert await bench.lease(16, 8) == 16
    bench.leases.use("acme", None, 8)
    assert bench.engine.allowed == {"acme": None}


async def test_a_running_request_may_end_normally_when_a_limit_is_set(bench: Bench) -> None:
    bench.engine.needs = 40
    bench.engine.may_need = {"acme": [30], "other": [99]}
    assert await bench.lease(4, 2) == 30
    bench.engine.may_need["acme"].clear()
    assert await bench.after(RENEW_SECONDS) == 4


async def test_an_idle_tenant_returns_its_lease_and_is_forgotten(bench: Bench) -> None:
    await bench.lease()
    assert await bench.after(RENEW_SECONDS) == 0
    await bench.after(IDLE_SECONDS + RENEW_SECONDS)
    calls = bench.pool.calls
    await bench.after(IDLE_SECONDS)
    assert bench.pool.calls == calls


async def test_a_tenant_whose_sequences_only_wait_keeps_its_lease(bench: Bench) -> None:
    await bench.lease()
    bench.engine.may_need["acme"] = [8]
    assert await bench.after(RENEW_SECONDS) == 0
    assert await bench.after(IDLE_SECONDS + RENEW_SECONDS) == 0
    bench.engine.may_need.clear()
    assert await bench.after(IDLE_SECONDS + RENEW_SECONDS) is None


async def test_a_limit_lifted_while_its_lease_is_renewed_stays_lifted(bench: Bench) -> None:
    bench.leases.use("acme", 64 * BLOCK, 8)
    looking = asyncio.ensure_future(bench.leases.renew_due())
    await asyncio.sleep(0)
    bench.leases.use("acme", None, 8)
    await looking
    assert bench.engine.allowed == {"acme": None}


async def test_a_store_that_answers_nonsense_is_an_outage_too(bench: Bench) -> None:
    bench.engine.needs = 8
    await bench.lease()
    lease_kv, bench.pool.lease_kv = bench.pool.lease_kv, bench.nonsense  # type: ignore[method-assign]
    assert await bench.after(RENEW_SECONDS) == 10
    bench.pool.lease_kv = lease_kv  # type: ignore[method-assign]
    assert await bench.after(RENEW_SECONDS) == 10
