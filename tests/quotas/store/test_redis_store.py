import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from quotas.errors import (
    BudgetSpent,
    ConnectionLost,
    LimitExceeded,
    NeverFits,
    QuotaError,
    QuotaRefused,
    StoreFault,
    StoreUnavailable,
)
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource, TokenPrices
from quotas.reservation import Ask, Attempt, Delivered, Usage
from quotas.store.account import state_key
from quotas.store.budget_states import BudgetOwner
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import Script, ScriptRunner
from tests.examples import examples
from tests.quotas.stores import usage_by_key
from tests.quotas.wire import Wire

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


async def test_a_response_that_is_not_to_be_stored_is_not_kept(
    store: RedisStore, other: RedisStore, tenant: str
) -> None:
    await store.lease_kv(tenant, 100, 100)
    assert await store.lease_kv(tenant, 100, 0) == (0, LEASE)
    assert await other.lease_kv(tenant, 100, 100) == (100, LEASE)


steps = st.tuples(st.integers(0, 2), st.integers(0, 150), st.sampled_from([0, 1, 10, 29, 30, 31]))


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(limit=st.integers(0, 100), steps=st.lists(steps, min_size=5, max_size=30))
async def test_leases_never_add_up_to_more_than_the_limit_and_expire(
    runner: ScriptRunner, limit: int, steps: list[tuple[int, int, int]]
) -> None:
    """Each step: a replica wants an amount, and then some seconds pass."""
    stores, tenant, now = [RedisStore(runner, LEASE) for _ in range(3)], uuid4().hex, 10**15
    leases: dict[int, tuple[int, float]] = {}
    for index, wanted, seconds in steps:
        await runner.client.execute(b"SET", b"test:clock", b"%d" % now)
        others = sum(held for name, (held, end) in leases.items() if name != index and end > now)
        granted, life = await stores[index].lease_kv(tenant, limit, wanted)
        assert granted == min(wanted, limit - others)
        leases[index] = granted, now + life * SECOND
        now += seconds * SECOND


async def test_a_rate_refills_after_the_clock_was_set_back(runner: ScriptRunner) -> None:
    rate = Limit(Resource.REQUESTS, 30, Rate(60, 2))
    budget = Limit(Resource.REQUESTS, 3, Budget(BudgetPeriod.DAY))
    store, tenant, noon = RedisStore(runner, LEASE), uuid4().hex, 10**15 - 10**15 % (86400 * SECOND)

    async def ask(seconds: int, limits: tuple[Limit, ...]) -> bool:
        await runner.client.execute(b"SET", b"test:clock", b"%d" % (noon + seconds * SECOND))
        try:
            await store.settle(await store.reserve(tenant, None, limits, Ask(1, 1, 1)), Usage(1, 1))
        except QuotaRefused:
            return False
        return True

    assert [await ask(0, (rate, budget)) for _ in range(3)] == [True, True, False]
    assert [await ask(-7200, (rate,)) for _ in range(2)] == [False, False]
    assert [await ask(-7200 + 2, (rate, budget)) for _ in range(2)] == [True, False]
    assert not await ask(-3600, (rate, budget)), "a budget keeps what was spent on the day before"


async def test_a_tenant_refused_while_the_clock_is_set_back_is_forgotten_in_time(
    runner: ScriptRunner,
) -> None:
    teams = (Limit(Resource.REQUESTS, 1, Rate(60, 1), team=uuid4().hex),)
    store, tenant = RedisStore(runner, LEASE), uuid4().hex
    await runner.client.execute(b"SET", b"test:clock", b"%d" % 10**15)
    await store.reserve(uuid4().hex, None, teams, Ask(1, 1, 1))
    await runner.client.execute(b"SET", b"test:clock", b"%d" % (10**15 - 7200 * SECOND))
    with pytest.raises(QuotaRefused):
        await store.reserve(tenant, None, teams, Ask(1, 1, 1))
    assert await runner.client.execute(b"PTTL", state_key(tenant).encode()) != -1


REQUESTS = Limit(Resource.REQUESTS, 10, Rate(3600, 10))
TOKENS = Limit(Resource.TOKENS, 1000, Rate(3600, 1000))
DAILY = Limit(Resource.TOKENS, 5000, Budget(BudgetPeriod.DAY))
MONTHLY = Limit(Resource.OUTPUT_TOKENS, 2000, Budget(BudgetPeriod.MONTH))
CONCURRENT = Limit(Resource.CONCURRENT_REQUESTS, 3)
KEY_TOKENS = Limit(Resource.TOKENS, 800, Rate(3600, 800), key="k1")
LIMITS = (REQUESTS, TOKENS, DAILY, MONTHLY, CONCURRENT, KEY_TOKENS)


@pytest.fixture
async def redis(store_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(store_url) as client:
        yield client


async def left(store: RedisStore, tenant: str, limits: tuple[Limit, ...] = LIMITS) -> dict[str, int]:
    return {state.limit.name: state.remaining for state in await store.states(tenant, "k1", limits)}


def less(requests: int = 0, tokens: int = 0, output_tokens: int = 0, running: int = 0) -> dict[str, int]:
    """What is left when this was taken from each limit."""
    return {
        "requests/h": 10 - requests,
        "tokens/h": 1000 - tokens,
        "tokens/day": 5000 - tokens,
        "output_tokens/month": 2000 - output_tokens,
        "concurrent_requests": 3 - running,
        "key:k1:tokens/h": 800 - tokens,
    }


async def test_models_with_prices_of_their_own_spend_one_budget(
    store: RedisStore, other: RedisStore, redis: Redis, tenant: str
) -> None:
    budget, prices = Budget(BudgetPeriod.DAY), TokenPrices(1, 1, 2, 2, "EUR", "minilm")
    cheap = (Limit(Resource.COST, 100_000, budget, prices=prices),)
    dear = (replace(cheap[0], prices=TokenPrices(100, 100, 200, 200, "EUR", "big")),)
    await store.settle(await store.reserve(tenant, None, cheap, Ask(1, 100, 50)), Usage(100, 25))
    running = [await store.reserve(tenant, None, limits, Ask(1, 100, 50)) for limits in (dear, cheap, dear)]
    assert [state.remaining for state in await other.states(tenant, None, dear)] == [100_000 - 150 - 200 - 2 * 20_000]
    await redis.delete(f"sluice:{{{tenant}}}")
    await store.heartbeat()  # restores what runs, each at its own prices
    for reservation in running:
        await store.settle(reservation, Usage(50, 0))
    assert [state.remaining for state in await other.states(tenant, None, cheap)] == [100_000 - 150 - 50 - 2 * 5_000]


@pytest.mark.parametrize("loss", [ConnectionLost(), StoreUnavailable(), StoreFault()], ids=repr)
async def test_a_settlement_whose_answer_is_lost_is_settled_once(
    store_url: str, store: RedisStore, tenant: str, loss: QuotaError
) -> None:
    runner = ScriptRunner(store_url, timeout=60)
    await runner.client.connect()
    wire = Wire(runner)
    mine = RedisStore(wire)
    reservation = await mine.reserve(tenant, "k1", LIMITS, Ask(1, 100, 200))
    wire.losses, wire.loss = 1, loss
    with pytest.raises(StoreFault) if isinstance(loss, StoreFault) else nullcontext():
        await mine.settle(reservation, Usage(100, 50))
    assert mine.num_unsettled == (not isinstance(loss, ConnectionLost)), "a new connection is asked at once"
    await mine.heartbeat()
    assert mine.num_unsettled == 0
    assert await left(store, tenant) == less(requests=1, tokens=150, output_tokens=50)
    await runner.client.close()


async def test_output_of_unknown_delivery_counts_as_it_was_booked(
    store: RedisStore, other: RedisStore, tenant: str
) -> None:
    limits = (Limit(Resource.OUTPUT_TOKENS, 100, Budget(BudgetPeriod.DAY)),)
    attempt = Attempt(uuid4().hex, 1)
    reservation = await store.reserve(tenant, None, limits, Ask(1, 10, 50, attempt=attempt))
    reservation.progress = Usage(10, 7)
    await store.heartbeat()
    assert not await other.conclude(tenant, Delivered(uuid4().hex, True, None))
    assert await other.conclude(tenant, Delivered(attempt.request, True, None))
    await store.settle(reservation, Usage(10, 50))
    (state,) = await other.states(tenant, None, limits)
    assert state.remaining == 93


async def test_a_conclusion_that_is_sent_again_is_told_what_it_did(store: RedisStore, tenant: str) -> None:
    class Lossy(ScriptRunner):
        """Loses the connection after each first call."""

        def __init__(self, runner: ScriptRunner) -> None:
            self.scripts, self.on_command, self.client = runner.scripts, runner.on_command, runner.client
            self.num_calls = 0

        async def run_once(self, script: Script, packed: bytes) -> list[bytes]:
            answer, self.num_calls = await super().run_once(script, packed), self.num_calls + 1
            if self.num_calls % 2:
                raise ConnectionLost
            return answer

    attempt = Attempt(uuid4().hex, 1)
    await store.reserve(tenant, None, (), Ask(1, 10, 50, attempt=attempt))
    mine = RedisStore(Lossy(store._runner))
    assert await mine.conclude(tenant, Delivered(attempt.request, True, 6))
    assert not await mine.conclude(tenant, Delivered(attempt.request, True, 6)), "by this call nothing was"


async def test_of_a_cut_answer_less_may_count_than_was_booked(
    store: RedisStore, other: RedisStore, tenant: str
) -> None:
    attempt = Attempt(uuid4().hex, 1)
    reservation = await store.reserve(tenant, None, (), Ask(1, 10, 50, attempt=attempt))
    reservation.progress = Usage(10, 7)
    await store.heartbeat()
    assert await other.conclude(tenant, Delivered(attempt.request, True, 6))
    assert await usage_by_key(other, tenant, datetime.now(UTC).date()) == {None: Usage(10, 6, requests=1)}


async def test_a_refusal_costs_nothing_and_names_the_limit(store: RedisStore, tenant: str) -> None:
    await store.reserve(tenant, "k1", LIMITS, Ask(1, 100, 500))
    before = await left(store, tenant)
    with pytest.raises(LimitExceeded) as refused:
        await store.reserve(tenant, "k1", LIMITS, Ask(1, 100, 200))
    assert (refused.value.limit, refused.value.asked, refused.value.left) == (KEY_TOKENS, 300, 200)
    assert refused.value.retry_after == pytest.approx(100 / 800 * 3600, abs=5)
    assert await left(store, tenant) == before


async def test_concurrency_says_no_time_at_which_it_could_work(store: RedisStore, tenant: str) -> None:
    for _ in range(3):
        await store.reserve(tenant, None, (CONCURRENT,), Ask())
    with pytest.raises(LimitExceeded) as refused:
        await store.reserve(tenant, None, (CONCURRENT,), Ask())
    assert refused.value.retry_after is None


async def test_a_spent_budget_says_when_it_resets(store: RedisStore, tenant: str) -> None:
    await store.reserve(tenant, None, (MONTHLY,), Ask(1, 0, 2000))
    with pytest.raises(BudgetSpent) as refused:
        await store.reserve(tenant, None, (MONTHLY,), Ask(1, 0, 1))
    resets = datetime.fromtimestamp(refused.value.resets_at, UTC)
    assert (resets.day, resets.hour, resets.minute, resets.second) == (1, 0, 0, 0)
    assert resets > datetime.now(UTC)


async def test_of_several_refusals_the_longest_wait_is_named(store: RedisStore, tenant: str) -> None:
    limits = (CONCURRENT, Limit(Resource.TOKENS, 100, Rate(1, 100)), Limit(Resource.REQUESTS, 3, Rate(3600, 3)))
    for _ in range(3):
        await store.reserve(tenant, None, limits, Ask(1, 0, 30))
    with pytest.raises(LimitExceeded) as refused:
        await store.reserve(tenant, None, limits, Ask(1, 0, 100))
    assert refused.value.limit.name == "requests/h"


@pytest.mark.parametrize("ask", [Ask(1, 801, 0), Ask(11, 0, 0), Ask(1, 0, 2001)])
async def test_a_request_that_never_fits_is_told_apart(store: RedisStore, tenant: str, ask: Ask) -> None:
    with pytest.raises(NeverFits):
        await store.reserve(tenant, "k1", LIMITS, ask)


async def test_use_is_booked_by_key_and_day(store: RedisStore, tenant: str) -> None:
    for key in ("k1", None, "*"):
        reservation = await store.reserve(tenant, key, LIMITS[:5], Ask(1, 100, 200))
        await store.settle(reservation, Usage(100, 50, 30, 1e9))
    entry = Usage(100, 50, 30, 10**9, 1)
    assert await usage_by_key(store, tenant, datetime.now(UTC).date()) == {"k1": entry, None: entry, "*": entry}


@pytest.mark.parametrize("name", ["{", "}", "{}x", "\0", "a\nb\r\n", "a b|c*:key:k1", "\udcff", "ä" * 300, ""])
async def test_no_name_crosses_into_another(store: RedisStore, tenant: str, name: str) -> None:
    limits = (TOKENS, Limit(Resource.TOKENS, 800, Rate(3600, 800), key=name or "k"))
    reservation = await store.reserve(tenant + name, name, limits, Ask(1, 100, 200))
    await store.heartbeat()
    await store.settle(reservation, Usage(100, 100))
    states = await store.states(tenant + name, name, limits)
    assert [state.remaining for state in states] == [800, 600]
    assert [state.remaining for state in await store.states(tenant, name, (TOKENS,))] == [800 if not name else 1000]


async def test_flushed_state_is_restored_with_what_runs(store: RedisStore, redis: Redis, tenant: str) -> None:
    running = await store.reserve(tenant, "k1", LIMITS, Ask(1, 100, 200))
    await redis.flushall()
    await redis.script_flush()
    ended = await store.reserve(tenant, "k1", LIMITS, Ask(1, 50, 50))
    assert (await left(store, tenant))["tokens/h"] == 600
    assert (await left(store, tenant))["concurrent_requests"] == 1
    await store.settle(ended, Usage(50, 50))
    await redis.flushall()
    await store.settle(running, Usage(100, 100))
    assert await left(store, tenant) == less(requests=2, tokens=300, output_tokens=150)


async def test_each_replica_restores_what_it_holds(
    store: RedisStore, other: RedisStore, redis: Redis, tenant: str
) -> None:
    await store.reserve(tenant, "k1", LIMITS, Ask(1, 100, 200))
    await other.reserve(tenant, "k1", LIMITS, Ask(1, 50, 50))
    await redis.flushall()
    await store.heartbeat()
    await other.heartbeat()
    remaining = await left(store, tenant)
    assert (remaining["tokens/h"], remaining["concurrent_requests"]) == (600, 1)


@pytest.mark.parametrize("is_beaten", [False, True])
async def test_a_cancelled_reserve_is_given_back_at_once(store: RedisStore, tenant: str, is_beaten: bool) -> None:
    calls = [asyncio.ensure_future(store.reserve(tenant, "k1", LIMITS, Ask(1, 100, 200))) for _ in range(4)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    if is_beaten:
        await store.heartbeat()
    remaining = await left(store, tenant)
    assert (remaining["tokens/h"], remaining["concurrent_requests"]) == (1000, 3)


async def test_every_reader_sees_that_a_dead_replica_holds_nothing(
    store: RedisStore, other: RedisStore, redis: Redis, tenant: str
) -> None:
    await store.reserve(tenant, "k1", LIMITS, Ask(1, 100, 200))
    assert (await left(other, tenant))["concurrent_requests"] == 2
    await redis.hset(f"sluice:{{{tenant}}}", mapping={f"p:{store.replica}": 1, "lease": 1})  # it ran out long ago
    assert (await left(other, tenant))["concurrent_requests"] == 3


@pytest.mark.parametrize("owner", ["tenant", "key", "team"])
async def test_a_list_of_budgets_counts_nothing_that_a_dead_replica_holds(
    store: RedisStore, other: RedisStore, redis: Redis, tenant: str, owner: str
) -> None:
    key, team = ("k1" if owner == "key" else None), (tenant if owner == "team" else None)
    limits = (Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.DAY), key, team=team),)
    owner = BudgetOwner.of(None if team else tenant, key, team, limits)
    assert owner is not None
    settled = await store.reserve(tenant, key, limits, Ask(1, 100, 200))
    await store.settle(settled, Usage(100, 50))
    await store.reserve(tenant, key, limits, Ask(1, 100, 200))

    async def remaining() -> list[int]:
        return [level.state.limit.remaining for level in await other.budgets([owner]) if level.state]

    assert await remaining() == [550]
    for state in (tenant, f"team:{team}") if team else (tenant,):
        lost = {f"p:{store.replica}": 1, "lease": 1} | ({f"t:sluice:{{{tenant}}}": 1} if ":" in state else {})
        await redis.hset(f"sluice:{{{state}}}", mapping=lost)
    assert await remaining() == [850]


async def test_an_owner_whose_state_cannot_be_settled_leaves_the_budgets_of_others_known(
    other: RedisStore, redis: Redis, tenant: str
) -> None:
    limits = (Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.DAY)),)
    owners = [BudgetOwner.of(name, None, None, limits) for name in (f"{tenant}-sick", f"{tenant}-well")]
    found = [owner for owner in owners if owner is not None]
    for owner in found:
        await redis.hset(owner.state.decode(), mapping={"p:dead": 1, "lease": 1, "t:held": 1})
    await redis.hset(found[0].state.decode(), "r:dead.1", "no reservation")
    levels = await other.budgets(found)
    assert {level.owner.tenant: level.used for level in levels} == {f"{tenant}-sick": None, f"{tenant}-well": 0}


async def test_state_expires_once_it_is_full_again(store: RedisStore, redis: Redis, tenant: str) -> None:
    limits = (Limit(Resource.REQUESTS, 10, Rate(60, 10)), KEY_TOKENS)
    await store.settle(await store.reserve(tenant, "k1", limits, Ask()), Usage())
    lives = [await redis.ttl(key) async for key in redis.scan_iter(f"sluice:{{{tenant}}}*")]
    assert len(lives) == 3
    state, key_levels, ledger = sorted(lives)
    assert 0 < state <= key_levels <= 2 * 3600 < ledger <= 400 * 86400


KEY_RATE = Limit(Resource.REQUESTS, 10, Rate(60, 10), key="k1")
KEY_CONCURRENCY = Limit(Resource.CONCURRENT_REQUESTS, 1, None, key="k1")


async def test_calls_about_shorter_limits_leave_the_life_that_a_longer_one_needs(
    store: RedisStore, other: RedisStore, redis: Redis, tenant: str
) -> None:
    monthly = (MONTHLY, Limit(Resource.TOKENS, 800, Budget(BudgetPeriod.MONTH), key="k1"))
    for limits in ((*monthly, KEY_RATE), (KEY_RATE,)):
        await store.settle(await store.reserve(tenant, "k1", limits, Ask(1, 10, 10), "lease"), Usage(10, 10))
        await store.heartbeat()  # which asks for the slices
    await other.settle(await other.reserve(tenant, "k1", (KEY_RATE,), Ask()), Usage())
    for key in (f"sluice:{{{tenant}}}", f"sluice:{{{tenant}}}:key:k1"):
        assert await redis.ttl(key) > 31 * 86400


async def test_a_replica_of_a_shorter_lease_leaves_anothers_lease_of_kv_memory(
    store: RedisStore, redis: Redis, tenant: str
) -> None:
    await store.lease_kv(tenant, 100, 70)
    await RedisStore(store._runner, lease=1.0).lease_kv(tenant, 100, 10)
    assert await redis.pttl(f"sluice:{{{tenant}}}:kv") > 1000


async def test_a_running_request_keeps_the_levels_of_its_key(store: RedisStore, redis: Redis, tenant: str) -> None:
    await store.reserve(tenant, "k1", (CONCURRENT, KEY_CONCURRENCY), Ask())
    for key in (f"sluice:{{{tenant}}}", f"sluice:{{{tenant}}}:key:k1"):
        await redis.pexpire(key, 1000)
        await store.heartbeat()
        assert await redis.ttl(key) > 3000
