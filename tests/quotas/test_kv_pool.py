"""KV memory that several replicas lease of one tenant's limit."""

import asyncio
from uuid import uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quotas.redis_store import RedisStore
from quotas.script_runner import ScriptRunner
from tests.examples import examples

LEASE = 30.0
SECOND = 10**6  # microseconds


async def test_a_lease_is_as_much_as_others_leave(store: RedisStore, other: RedisStore, tenant: str) -> None:
    assert await store.lease_kv(tenant, 100, 70) == (70, LEASE)
    assert await other.lease_kv(tenant, 100, 70) == (30, LEASE)
    assert await store.lease_kv(tenant, 100, 20) == (20, LEASE), "it replaces the lease before"
    assert await other.lease_kv(tenant, 100, 70) == (70, LEASE)
    assert await store.lease_kv(tenant, 100, 40) == (30, LEASE)


async def test_a_lowered_limit_shrinks_what_is_leased_anew(store: RedisStore, other: RedisStore, tenant: str) -> None:
    await store.lease_kv(tenant, 100, 60)
    assert await other.lease_kv(tenant, 50, 40) == (0, LEASE)
    assert await store.lease_kv(tenant, 50, 60) == (50, LEASE)


async def test_what_is_not_wanted_is_not_kept(store: RedisStore, other: RedisStore, tenant: str) -> None:
    await store.lease_kv(tenant, 100, 100)
    assert await store.lease_kv(tenant, 100, 0) == (0, LEASE)
    assert await other.lease_kv(tenant, 100, 100) == (100, LEASE)


steps = st.tuples(st.integers(0, 2), st.integers(0, 150), st.sampled_from([0, 1, 10, 29, 30, 31]))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(limit=st.integers(0, 100), steps=st.lists(steps, min_size=5, max_size=30))
def test_leases_never_add_up_to_more_than_the_limit_and_expire(
    loop_and_runner: tuple[asyncio.Runner, ScriptRunner], limit: int, steps: list[tuple[int, int, int]]
) -> None:
    """Each step: a replica wants so much, and then so many seconds pass."""
    loop, runner = loop_and_runner

    async def live() -> None:
        stores, tenant, now = [RedisStore(runner, LEASE) for _ in range(3)], uuid4().hex, 10**15
        leases: dict[int, tuple[int, float]] = {}
        for index, wanted, seconds in steps:
            await runner.client.execute(b"SET", b"test:clock", b"%d" % now)
            others = sum(held for name, (held, end) in leases.items() if name != index and end > now)
            granted, life = await stores[index].lease_kv(tenant, limit, wanted)
            assert granted == min(wanted, limit - others)
            leases[index] = granted, now + life * SECOND
            now += seconds * SECOND

    loop.run(live())
