"""Levels of teams, sessions and keys."""

from dataclasses import replace
from uuid import uuid4

from quotas.policy.limit import PER_SESSION, Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.account import state_key
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.clocked_tenant import LEASE
from tests.quotas.store.test_replica import Pair
from tests.quotas.store_model import DAY


async def test_a_session_that_was_idle_for_a_day_begins_anew_when_its_tenant_was_idle_too(
    runner: ScriptRunner,
) -> None:
    pair = Pair(runner, Limit(Resource.TOKENS, 100, PER_SESSION, session="one"))
    pair.other._monotonic = lambda: pair.tenant.now / 1e6
    await pair.tenant.wait(0)
    await pair.other.settle(await pair.reserve(pair.other, Ask(1, 100, 0)), Usage(100))
    await pair.tenant.wait(2 * DAY)
    state = state_key(pair.tenant.tenant)
    for key in (state, f"{state}:session:one"):  # which expire by the server's own clock
        await runner.client.execute(b"DEL", key.encode())
    await pair.other.heartbeat()
    await pair.reserve(pair.other, Ask(1, 100, 0))


async def test_a_teams_requests_are_given_back_for_another_tenant_though_a_reclaim_came_before_the_first(
    runner: ScriptRunner,
) -> None:
    pair, team = Pair(runner), uuid4().hex
    await pair.tenant.wait(0)
    held, life = Limit(Resource.CONCURRENT_REQUESTS, 1, team=team), round(LEASE * 1e6)
    before, other = RedisStore(runner, LEASE), replace(held, team=None, amount=9)
    await before.reserve(pair.tenant.tenant, None, (other,), Ask())
    await pair.tenant.wait(life // 2)
    await pair.cut.reserve(pair.tenant.tenant, None, (other,), Ask())
    await pair.tenant.wait(life // 2 + 1)  # the first one's lease is over as the tenant joins the team
    await pair.cut.reserve(pair.tenant.tenant, None, (held,), Ask())
    await pair.tenant.wait(2 * life)
    await pair.other.reserve(pair.tenant.neighbour, None, (held,), Ask())
