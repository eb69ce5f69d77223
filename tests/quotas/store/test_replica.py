"""Random lives of several replicas on a clock that the test turns, beside a reference in exact fractions."""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.bound_process import bound
from quotas.errors import NeverFits, NotSent, QuotaError, QuotaRefused, StoreFault, StoreUnavailable
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import NOTHING, Ask, Attempt, Delivered, LimitState, Reservation, Usage
from quotas.store.budget_states import budget_state
from quotas.store.redis_store import RedisStore
from quotas.store.replica_name import LIFE_ORDINALS, ReplicaName
from quotas.store.scripts import Script, ScriptRunner
from tests.examples import examples
from tests.quotas.clocked_tenant import LEASE, SESSION, TEAM, ClockedTenant, Policy, Steps, booked, policies_of
from tests.quotas.store_model import DAY, Model, Taken
from tests.quotas.wire import Wire

START = 1_709_000_000_000_000  # 27 February 2024: a leap day, ends of a week and of a month are near
KEYS = (None, "k1", "k2")
OWNERS = (*KEYS, TEAM, SESSION)

amounts = st.integers(5, 60) | st.integers(5, 60) | st.sampled_from([997, 10**6, 4 * 10**9])
waits = st.sampled_from([0, 1, 333_333, 10**6, 7 * 10**6, 29 * 10**6, 31 * 10**6, 3600 * 10**6, DAY, 3 * DAY])


policies = policies_of(OWNERS, amounts, held=(0, 4), most=3, fewest=0)
asks = st.builds(Ask, st.sampled_from([1, 1, 1, 2, 0]), st.integers(0, 12), st.integers(0, 12))
reserves = st.tuples(st.just("reserve"), st.integers(0, 2), st.sampled_from(KEYS), asks)
steps = st.one_of(
    reserves,
    reserves,
    reserves,
    st.tuples(st.just("extend"), st.integers(0, 20), st.integers(0, 8)),
    st.tuples(st.just("settle"), st.integers(0, 20), st.integers(0, 14), st.integers(0, 14)),
    st.tuples(st.just("progress"), st.integers(0, 20), st.integers(0, 14), st.integers(0, 14)),
    st.tuples(st.just("wait"), waits),
    st.tuples(st.just("wait"), waits),
    st.tuples(st.just("retry"), st.integers(0, 20), st.integers(0, 2)),
    st.tuples(st.just("conclude"), st.integers(0, 20), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("crash"), st.integers(0, 2)),
    st.tuples(st.just("reload"), st.integers(0, 2)),
)


@dataclass
class Life:
    """One replica, from its start to its crash."""

    store: RedisStore
    taken: dict[Reservation, Taken] = field(default_factory=dict)

    async def heartbeat(self) -> None:
        await self.store.heartbeat()
        for reservation, taken in self.taken.items():
            taken.booked = reservation.progress._replace(reasoning_tokens=0)  # known once it has ended


def _usage(input_tokens: int, output_tokens: int) -> Usage:
    """Usage with a third of its input found in the cache, and half of its output reasoning."""
    return Usage(input_tokens, output_tokens, input_tokens // 3, reasoning_tokens=output_tokens // 2)


class World(ClockedTenant):
    """Two tenants of a team, three replicas, and what the reference thinks of them."""

    def __init__(self, runner: ScriptRunner, policies: list[Policy]) -> None:
        super().__init__(runner, policies[0], START)
        self.policies = list(map(self.named, policies))
        self.days = {START // DAY}
        self.model = Model()
        self.lives = [self._new_life() for _ in range(3)]
        self.dead: list[Life] = []

    async def live(self, steps: Steps) -> None:
        await super().live(steps)
        await self.finish()

    async def reserve(self, index: int, key: str | None, ask: Ask) -> None:
        life, tenant, limits = self.lives[index], self.tenant_of(key), self.limits_of(key)
        ask = replace(ask, attempt=ask.attempt or Attempt(uuid4().hex, 1))
        if any(ask.of(limit) > limit.capacity for limit in limits):
            with pytest.raises(NeverFits):
                await life.store.reserve(tenant, key, limits, ask)
            return
        await self._foresee_reclaim(tenant, limits)
        fits = self.model.charge(limits, ask, self.now)
        if fits:
            reservation = await life.store.reserve(tenant, key, limits, ask)
            life.taken[reservation] = Taken(limits, [(self.now, ask)])
            await self._check_states(tenant, reservation.states)
            return
        with pytest.raises(QuotaRefused) as raised:
            await life.store.reserve(tenant, key, limits, ask)
        refused = raised.value
        assert refused.left == self.model.left(refused.limit, self.now) < refused.asked
        await self._check_states(tenant, await life.store.states(tenant, key, limits))

    async def extend(self, pick: int, more: int) -> None:
        for life, reservation in self._picked(pick):
            taken, extra = life.taken[reservation], Ask(0, 0, more)
            if any(extra.of(limit) > limit.capacity for limit in taken.limits):
                continue
            fits = more == 0 or self.model.charge(taken.limits, extra, self.now)
            try:
                await life.store.extend(reservation, more)
            except QuotaRefused:
                assert not fits
            else:
                assert fits
                taken.charges.append((self.now, extra))

    async def settle(self, pick: int, input_tokens: int, output_tokens: int) -> None:
        for life, reservation in self._picked(pick):
            done = reservation.progress
            usage = _usage(max(input_tokens, done.input_tokens), max(output_tokens, done.output_tokens))
            await life.store.settle(reservation, usage)
            await life.store.settle(reservation, Usage())
            self.model.settle(life.taken.pop(reservation), usage, self.now)

    async def progress(self, pick: int, input_tokens: int, output_tokens: int) -> None:
        for life, reservation in self._picked(pick):
            done = reservation.progress
            reservation.progress = _usage(max(done.input_tokens, input_tokens), max(done.output_tokens, output_tokens))
            await life.heartbeat()

    async def retry(self, pick: int, index: int) -> None:
        """A later attempt supersedes another replica's, which may be dead, or go on and settle it."""
        running = [(life, reservation) for life in (*self.lives, *self.dead) for reservation in life.taken]
        if not running:
            return
        life, reservation = running[pick % len(running)]
        attempt, limits = reservation.ask.attempt, self.limits_of(reservation.key)
        assert attempt is not None
        ask = replace(reservation.ask, attempt=attempt._replace(number=attempt.number + 1))
        if any(ask.of(limit) > limit.capacity for limit in limits):
            return
        self.model.settle(life.taken.pop(reservation), NOTHING, self.now)
        await self.reserve(index, reservation.key, ask)
        if life in self.lives and pick % 2:
            await life.store.settle(reservation, reservation.progress)

    async def conclude(self, pick: int, output_tokens: int, has_begun: bool) -> None:
        """Another replica settles by what was delivered what one holds, which may be dead, or go on and settle it."""
        running = [(life, reservation) for life in (*self.lives, *self.dead) for reservation in life.taken]
        if not running:
            return
        life, reservation = running[pick % len(running)]
        taken, attempt = life.taken.pop(reservation), reservation.ask.attempt
        assert attempt is not None
        whole = reservation.ask
        computed, cached = min(output_tokens, whole.output_tokens), taken.booked.cached_tokens
        usage = Usage(whole.input_tokens, computed, cached, requests=whole.requests)
        self.model.settle(taken, usage if has_begun else NOTHING, self.now)
        for is_there in (True, False):
            delivered = Delivered(attempt.request, has_begun, output_tokens)
            assert await self.lives[0].store.conclude(reservation.tenant, delivered) is is_there
        if life in self.lives and pick % 2:
            await life.store.settle(reservation, reservation.progress)

    async def wait(self, micros: int) -> None:
        await super().wait(micros)
        self.days.add(self.now // DAY)
        for life in self.lives:
            await life.heartbeat()

    async def crash(self, index: int) -> None:
        self.dead.append(self.lives[index])
        self.lives[index] = self._new_life()

    async def reload(self, index: int) -> None:
        self.policy = self.policies[index % len(self.policies)]

    async def finish(self) -> None:
        """All ends: nothing is held any more, and the ledger holds what was spent, neither more nor less."""
        for life in self.lives:
            for reservation in list(life.taken):
                await life.store.settle(reservation, reservation.progress)
                self.model.settle(life.taken.pop(reservation), reservation.progress, self.now)
        await self.wait(round(LEASE * 1e6))
        store, found = self.lives[0].store, NOTHING
        for key in (None, "k2"):
            tenant = self.tenant_of(key)
            await self._foresee_reclaim(tenant, ())
            await store.settle(await store.reserve(tenant, key, (), Ask(0)), Usage(requests=0))
            assert not [name for name in await self.state(owner=tenant) if name.startswith(b"r:")]
            found += await booked(store, tenant, self.days)
        assert found == sum(self.model.spent, NOTHING)
        self._check_flows()

    async def _check_states(self, tenant: str, states: tuple[LimitState, ...]) -> None:
        for state in states:
            limit, used = state.limit, self.model.used(state.limit, self.now)
            assert state.remaining == self.model.left(limit, self.now)
            if isinstance(limit.window, Rate):
                assert state.reset == ceil(used * limit.window.seconds) / limit.amount
            if isinstance(limit.window, Budget):
                owner = f"team:{limit.team}" if limit.team else tenant
                levels = await self.state(f":key:{limit.key}" if limit.key else "", owner)
                assert budget_state(limit, levels, self.now).limit == state, "a list of budgets reads the same"

    def _check_flows(self) -> None:
        """admitted(t) <= burst + rate * t from any time on, by the most generous of the policies."""
        limits = [limit for policy in self.policies for owner in OWNERS for limit in policy[owner]]
        for name, level in self.model.levels.items():
            same = [limit for limit in limits if limit.name == name]
            for start, (begin, _) in enumerate(level.moves):
                admitted = 0
                for moment, amount in level.moves[start:]:
                    admitted += amount
                    assert admitted <= _most(same, moment - begin)

    async def _foresee_reclaim(self, tenant: str, limits: tuple[Limit, ...]) -> None:
        """The next reserve settles what the dead held, if it finds a lease run out: the tenant's, or its team's."""
        team = await self.state(owner=f"team:{self.team}") if any(limit.team for limit in limits) else {}
        if int(team.get(b"lease", self.now + 1)) <= self.now:
            for member, expiry in team.items():
                if member.startswith(b"t:") and int(expiry) <= self.now:
                    await self._foresee_reclaim_of(member.decode()[len("t:sluice:{") : -1])
        if int((await self.state(owner=tenant)).get(b"lease", self.now + 1)) <= self.now:
            await self._foresee_reclaim_of(tenant)

    async def _foresee_reclaim_of(self, tenant: str) -> None:
        state = await self.state(owner=tenant)
        for life in self.dead:
            if int(state.get(f"p:{life.store.replica}".encode(), 0)) <= self.now:
                for reservation in [one for one in life.taken if one.tenant == tenant]:
                    taken = life.taken.pop(reservation)
                    usage = taken.booked._replace(requests=taken.charges[0][1].requests)
                    self.model.settle(taken, usage, self.now)

    def _picked(self, pick: int) -> list[tuple[Life, Reservation]]:
        running = [(life, reservation) for life in self.lives for reservation in life.taken]
        return [running[pick % len(running)]] if running else []

    def _new_life(self) -> Life:
        return Life(RedisStore(self.runner, LEASE))


def _most(limits: list[Limit], duration: int) -> Fraction:
    """The most that may be admitted within a time in microseconds."""
    capacity = max(limit.capacity for limit in limits)
    match limits[0].window:
        case Rate(seconds=seconds):
            return capacity + Fraction(max(limit.amount for limit in limits) * duration, seconds * 10**6)
        case Budget():
            return Fraction(capacity * (duration // DAY + 2))
    return Fraction(capacity)


@settings(max_examples=examples(30, at_night=1500), deadline=None, suppress_health_check=list(HealthCheck))
@given(policies=st.lists(policies, min_size=1, max_size=3), steps=st.lists(steps, min_size=20, max_size=60))
async def test_no_interleaving_overspends_or_loses_anything(
    runner: ScriptRunner, policies: list[Policy], steps: Steps
) -> None:
    await World(runner, policies).live(steps)


LIMIT = 20_000

SPENDER = """
import asyncio, sys
from quotas.errors import QuotaRefused
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Resource
from quotas.store.redis_store import RedisStore
from quotas.reservation import Ask, Usage

async def spend(store, tenant, limits):
    spent = refused = 0
    while refused < 3:
        try:
            reservation = await store.reserve(tenant, None, limits, Ask(1, 10, 40))
        except QuotaRefused:
            refused += 1
        else:
            await store.settle(reservation, Usage(10, 20))
            spent += 30
    return spent

async def main(url, tenant, limit):
    store = RedisStore.at(url, timeout=30)
    await store.connect()
    limits = (Limit(Resource.TOKENS, int(limit), Budget(BudgetPeriod.MONTH)),)
    print(sum(await asyncio.gather(*(spend(store, tenant, limits) for _ in range(16)))))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_four_processes_spend_one_limit_exactly(valkey_url: str) -> None:
    command = [sys.executable, "-c", SPENDER, valkey_url, uuid4().hex, str(LIMIT)]
    processes = [subprocess.Popen(**bound(command), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    spent = sum(int(process.communicate()[0]) for process in processes)
    assert 0.98 * LIMIT <= spent <= LIMIT


class Pair:
    """Two replicas of one tenant on a clock that the test turns; the first may be cut off."""

    def __init__(self, runner: ScriptRunner, *limits: Limit, now: int = START) -> None:
        self.tenant = ClockedTenant(runner, {None: list(limits)}, now)
        self.wire = Wire(runner)
        self.cut, self.other = RedisStore(self.wire, LEASE), RedisStore(runner, LEASE)
        self.limits = limits

    async def reserve(self, store: RedisStore, ask: Ask) -> Reservation:
        return await store.reserve(self.tenant.tenant, None, self.limits, ask)

    async def outlive_lease(self) -> None:
        """The other replica reclaims what the first holds, and takes nothing."""
        await self.tenant.wait(round(LEASE * 1e6) + 1)
        await self.other.settle(await self.reserve(self.other, Ask(1, 0, 1)), NOTHING)

    async def used(self) -> int:
        (state,) = await self.other.states(self.tenant.tenant, None, self.limits)
        return state.limit.capacity - state.remaining

    async def booked(self) -> Usage:
        today = self.tenant.now // DAY
        return await booked(self.other, self.tenant.tenant, range(today - 1, today + 1))


BUDGET = Limit(Resource.TOKENS, 10_000, Budget(BudgetPeriod.DAY))


@pytest.mark.parametrize("cut", [NotSent(), StoreUnavailable()], ids=repr)
@pytest.mark.parametrize("ends", [True, False], ids=["ended in the cut", "ends after it"])
async def test_a_reservation_reclaimed_by_others_is_charged_and_booked_once(
    runner: ScriptRunner, cut: QuotaError, ends: bool
) -> None:
    pair = Pair(runner, BUDGET)
    await pair.tenant.wait(0)
    reservation = await pair.reserve(pair.cut, Ask(1, 1000, 1000))
    await pair.cut.heartbeat()
    pair.wire.is_cut, pair.wire.cut = True, cut
    if ends:
        await pair.cut.settle(reservation, Usage(1000, 700))
    await pair.outlive_lease()
    pair.wire.is_cut = False
    await pair.cut.heartbeat()
    await pair.cut.settle(reservation, Usage(1000, 700))
    assert (await pair.used(), await pair.booked(), pair.cut.num_unsettled) == (1700, Usage(1000, 700), 0)


async def test_an_attempt_that_another_superseded_stays_so_when_its_replica_returns(runner: ScriptRunner) -> None:
    pair, request = Pair(runner, BUDGET), uuid4().hex
    await pair.tenant.wait(0)
    first = await pair.reserve(pair.cut, Ask(1, 1000, 1000, attempt=Attempt(request, 1)))
    second = await pair.reserve(pair.other, Ask(1, 1000, 1000, attempt=Attempt(request, 2)))
    await pair.outlive_lease()
    await pair.other.settle(second, Usage(1000, 800))
    await pair.cut.heartbeat()
    await pair.cut.settle(first, Usage(1000, 500))
    assert (await pair.used(), await pair.booked()) == (1800, Usage(1000, 800))


@pytest.mark.parametrize("is_same_replica", [True, False])
async def test_marks_for_a_replica_go_when_it_begins_anew_or_is_away_for_an_hour(
    runner: ScriptRunner, is_same_replica: bool
) -> None:
    pair, request = Pair(runner, BUDGET), uuid4().hex
    await pair.tenant.wait(0)
    for number, store in enumerate((pair.cut, pair.other), start=1):
        await pair.reserve(store, Ask(1, 1, 1, attempt=Attempt(request, number)))
    await pair.reserve(pair.cut, Ask(1, 1, 1))
    await pair.outlive_lease()
    assert {field[:2] for field in await pair.tenant.state()} >= {b"x:", b"g:"}
    if is_same_replica:
        name = ReplicaName()
        name.id, name.first_ordinal = pair.cut.replica, LIFE_ORDINALS
        await RedisStore(runner, LEASE, name=name).states(pair.tenant.tenant, None, pair.limits)
    else:
        await pair.tenant.wait(3600 * 10**6)
        await pair.outlive_lease()
    assert not [field for field in await pair.tenant.state() if field[:2] in {b"x:", b"g:"}]


async def test_an_extension_on_the_next_day_is_refunded_in_that_day(runner: ScriptRunner) -> None:
    pair = Pair(runner, BUDGET, now=(START // DAY + 1) * DAY - 20 * 10**6)
    await pair.tenant.wait(0)
    reservation = await pair.reserve(pair.cut, Ask(1, 100, 8000))
    await pair.outlive_lease()
    await pair.cut.heartbeat()
    assert await pair.used() == 8100
    await pair.cut.settle(reservation, Usage(100, 10))
    assert await pair.used() == 110


async def test_more_reservations_than_one_script_restores_are_handed_over(runner: ScriptRunner) -> None:
    pair, count = Pair(runner, replace(BUDGET, amount=10**6)), 4100
    await pair.tenant.wait(0)
    pair.wire.is_cut = True
    for _ in range(count):
        await pair.cut.reserve(pair.tenant.tenant, None, pair.limits, Ask(1, 0, 10), "open")
    pair.wire.is_cut = False
    await pair.cut.heartbeat()
    assert await pair.used() == 10 * count


async def test_no_call_renews_or_reclaims_more_reservations_than_take_the_store_a_moment(
    runner: ScriptRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once, told = ScriptRunner.run_once, list[tuple[Script, int, int]]()
    pair, count = Pair(runner, replace(BUDGET, amount=10**6)), 1200

    async def held() -> int:
        return sum(field[:2] == b"r:" for field in await pair.tenant.state())

    async def counted(self: ScriptRunner, script: Script, packed: bytes) -> list[bytes]:
        """Count the reservations that a call names, besides the one that the state's generation is called by."""
        before, answer = await held(), await run_once(self, script, packed)
        told.append((script, packed.count(b"\r\nr:") - 1, before - await held()))
        return answer

    await pair.tenant.wait(0)
    for _ in range(count):
        await pair.reserve(pair.cut, Ask(1, 0, 10))
    monkeypatch.setattr(ScriptRunner, "run_once", counted)
    await pair.cut.heartbeat()
    assert [named for script, named, _ in told if script is Script.HEARTBEAT] == [500, 500, 200]
    await pair.outlive_lease()
    assert await held() == 0
    settled = [settled for script, _, settled in told if script is Script.RECLAIM]
    assert sum(settled) == count and max(settled) == 500


async def test_a_fault_in_one_tenants_state_stops_no_other_tenants_heartbeat(runner: ScriptRunner) -> None:
    pair, faulty = Pair(runner, BUDGET), Pair(runner, BUDGET).tenant.tenant
    await pair.tenant.wait(0)
    await pair.cut.reserve(faulty, None, pair.limits, Ask(1, 10, 10))
    await runner.client.execute(b"HSET", f"sluice:{{{faulty}}}".encode(), b"now", b"x")
    pair.cut.book(pair.tenant.tenant, None, Usage(5, 5))
    with pytest.raises(StoreFault):
        await pair.cut.heartbeat()
    assert await pair.booked() == Usage(5, 5)


async def test_a_retry_or_a_router_finds_each_attempt_by_the_request_and_leaves_no_index(
    runner: ScriptRunner,
) -> None:
    pair = Pair(runner, BUDGET)
    await pair.tenant.wait(0)
    requests = [uuid4().hex for _ in range(4)]
    firsts = [Ask(1, 10, 10, attempt=Attempt(request, 1)) for request in requests]
    held = [await pair.reserve(pair.cut, ask) for ask in firsts for _ in range(2)]  # both late, of one request
    await runner.client.execute(b"CONFIG", b"RESETSTAT")
    assert await pair.other.conclude(pair.tenant.tenant, Delivered(requests[0], True, 5))
    second = await pair.reserve(pair.other, Ask(1, 10, 10, attempt=Attempt(requests[1], 2)))
    assert b"hgetall" not in await runner.client.execute(b"INFO", b"commandstats")
    await pair.other.settle(second, Usage(10, 10))
    await pair.cut.settle(held[4], Usage(10, 10))
    state = f"sluice:{{{pair.tenant.tenant}}}".encode()
    await runner.client.execute(b"HSET", state, b"q:" + requests[0].encode(), b"r:1.1.%b " % requests[0].encode())
    assert not await pair.other.conclude(pair.tenant.tenant, Delivered(requests[0], True, 5)), "an older left it"
    await pair.outlive_lease()
    assert not [field for field in await pair.tenant.state() if field[:2] in {b"r:", b"q:"}]
    assert await pair.used() == 2 * 15 + 20 + 20


TEAM_LIMITS = (
    Limit(Resource.CONCURRENT_REQUESTS, 1, team="t"),
    Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.DAY), team="t"),
)


async def test_a_team_gets_back_what_a_lost_replica_held_for_a_tenant_that_is_idle_now(runner: ScriptRunner) -> None:
    team = uuid4().hex
    pair = Pair(runner, *(replace(limit, team=team) for limit in TEAM_LIMITS))
    idle, asking = pair.tenant.neighbour, pair.tenant.tenant
    await pair.tenant.wait(0)
    await pair.cut.reserve(idle, None, pair.limits, Ask(1, 100, 700))
    with pytest.raises(QuotaRefused):
        await pair.other.reserve(asking, None, pair.limits, Ask(1, 1, 1))
    for _ in range(2):  # the tenants of a team are looked through four times in a lease
        await pair.tenant.wait(round(LEASE * 1e6))
    held = await pair.other.reserve(asking, None, pair.limits, Ask(1, 100, 800))
    assert [state.remaining for state in held.states] == [0, 100]
    await pair.other.settle(held, Usage(100, 50))
    states = await pair.other.states_of_team(team, pair.limits)
    assert [state.remaining for state in states] == [1, 850]
    assert await booked(pair.other, idle, [pair.tenant.now // DAY]) == Usage()


async def test_a_team_spends_what_its_tenants_replicas_saw_before_the_store_lost_its_state(
    runner: ScriptRunner,
) -> None:
    team = uuid4().hex
    pair = Pair(runner, *(replace(limit, team=team, amount=2000) for limit in TEAM_LIMITS))
    tenants = (pair.tenant.tenant, pair.tenant.neighbour)
    await pair.tenant.wait(0)
    running = [
        await store.reserve(tenant, None, pair.limits, Ask(1, 100, 100))
        for tenant in tenants
        for store in (pair.cut, pair.other)
    ]
    for owner in (*tenants, f"team:{team}"):
        await runner.client.execute(b"DEL", f"sluice:{{{owner}}}".encode())
    for store in (pair.cut, pair.other):
        await store.heartbeat()
    states = await pair.other.states_of_team(team, pair.limits)
    assert [state.limit.capacity - state.remaining for state in states] == [4, 800]
    for store, reservation in zip((pair.cut, pair.other) * 2, running, strict=True):
        await store.settle(reservation, Usage(100, 25))
    states = await pair.other.states_of_team(team, pair.limits)
    assert [state.limit.capacity - state.remaining for state in states] == [0, 500]
