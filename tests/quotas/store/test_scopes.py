"""Levels of teams, sessions and keys, and reservations of an older version that knew fewer of them."""

import asyncio
from dataclasses import replace
from datetime import date, timedelta
from uuid import uuid4

import pytest

from quotas.policy.limit import PER_SESSION, Limit, Resource
from quotas.reservation import NOTHING, Ask, Attempt, Delivered, Usage
from quotas.store.account import RECORD, packed, state_key
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from quotas.usage_row import UsageRow
from tests.quotas.clocked_tenant import LEASE
from tests.quotas.store.test_replica import BUDGET, START, Pair
from tests.quotas.store_model import DAY

TimedRunner = tuple[asyncio.Runner, ScriptRunner]


def test_a_session_that_was_idle_for_a_day_begins_anew_when_its_tenant_was_idle_too(
    loop_and_runner: TimedRunner,
) -> None:
    loop, runner = loop_and_runner

    async def live() -> None:
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

    loop.run(live())


def test_a_teams_requests_are_given_back_for_another_tenant_though_a_reclaim_came_before_the_first(
    loop_and_runner: TimedRunner,
) -> None:
    loop, runner = loop_and_runner

    async def live() -> None:
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

    loop.run(live())


@pytest.mark.parametrize("end", ["settled", "concluded", "reclaimed"])
def test_a_reservation_of_an_older_version_is_given_back_to_its_tenant_and_key(
    loop_and_runner: TimedRunner, end: str
) -> None:
    loop, runner = loop_and_runner

    async def live() -> None:
        limits = (BUDGET, replace(BUDGET, key="k1"), replace(BUDGET, team=uuid4().hex))
        pair, attempt = Pair(runner, *limits), Attempt(uuid4().hex, 1)
        await pair.tenant.wait(0)
        tenant, state = pair.tenant.tenant, state_key(pair.tenant.tenant).encode()
        taken = await pair.cut.reserve(tenant, "k1", limits, Ask(1, 100, 100, attempt=attempt))
        field, days = f"r:{taken.id}".encode(), (START // DAY, START // DAY)
        columns = [BUDGET.label] * 2, ["t"] * 2, ["day"] * 2, [1] * 2
        spec = packed([2, 1, "k1", *(cell for column in columns for cell in column)])  # neither teams nor a row
        await runner.client.execute(b"HSET", state, field, RECORD.pack(1, 100, 100, 0, 0, 0, *days, 0) + spec)
        if end == "settled":
            await pair.cut.settle(taken, Usage(100, 20))
        elif end == "concluded":
            await pair.other.conclude(tenant, Delivered(attempt.request, True, 20))
        else:
            await pair.tenant.wait(round(LEASE * 1e6) + 1)
            await pair.other.settle(await pair.other.reserve(tenant, "k1", limits, Ask(1, 0, 1)), NOTHING)
        used = 0 if end == "reclaimed" else 120
        states = await pair.other.states(tenant, "k1", limits)
        assert [one.limit.capacity - one.remaining for one in states] == [used, used, 200], "the record knows no team"
        (rows,) = await pair.other.usages([(tenant, date(1970, 1, 1) + timedelta(days=START // DAY))])
        assert {row: use.requests for row, use in rows.items()} == {UsageRow("k1"): 1}

    loop.run(live())
