"""Replicas that are cut off for random times, lose answers and crash: together they never exceed a limit."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from struct import unpack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quotas.errors import NeverFits, QuotaRefused, StoreUnavailable
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import NOTHING, Ask, Reservation, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.replica_name import LIFE_ORDINALS, ReplicaName
from quotas.store.scripts import ScriptRunner
from tests.examples import examples
from tests.quotas.clocked_tenant import LEASE, ONE_PRICE, TEAM, ClockedTenant, Policy, Steps, booked, policies_of
from tests.quotas.store_model import DAY, stretch
from tests.quotas.wire import Wire

BEAT = 10_000_000  # microseconds
START = 1_719_792_000_000_000 - 25_000_000  # a day, a week and a month end in 25 seconds
KEYS = (None, "k1", "k2")
OWNERS = (*KEYS, TEAM)
GREED = 300  # requests, at most
Step = tuple[object, ...]
PACES = (1.0, 0.95, 1.05)  # of the replicas' own clocks

amounts = st.integers(40, 1000)
replicas = st.integers(0, 2)


asks = st.builds(Ask, st.just(1), st.integers(1, 9), st.integers(1, 9))
whom = replicas | st.none()
bursts = st.tuples(st.just("reserve"), replicas, st.sampled_from(KEYS), asks, st.sampled_from([1, 2, 5, 50]))
waits = st.tuples(st.just("wait"), st.sampled_from([0, 333_333, 10**6, 7 * 10**6, 20 * 10**6, 29 * 10**6, 70 * 10**6]))
settles = st.tuples(st.just("settle"), st.integers(0, 40), st.none())
partial_settles = st.tuples(st.just("settle"), st.integers(0, 40), st.integers(0, 3))
extensions = st.tuples(st.just("extend"), st.integers(0, 40), st.integers(1, 4))
losses = st.tuples(st.just("lose"), replicas, st.integers(1, 3))
crashes = st.tuples(st.just("crash"), replicas)


@st.composite
def outages(draw: st.DrawFn, during: st.SearchStrategy[Step]) -> list[Step]:
    """Of one replica or of all, that were busy before; in it and after it each takes what it gets."""
    key, ask = draw(st.sampled_from(KEYS)), draw(asks)
    warm_up = [("reserve", index, key, ask, 2) for index in range(3)]
    greed = [("reserve", index, key, ask, GREED) for index in draw(st.permutations(range(3)))]
    some = st.lists(bursts | during, max_size=3)
    return [
        *warm_up,
        ("wait", draw(st.integers(0, BEAT))),
        ("cut", draw(whom)),
        *draw(some),
        *(greed if draw(st.booleans()) else ()),
        *draw(some),
        ("mend", draw(whom)),
        *(greed if draw(st.booleans()) else ()),
    ]


def histories(*kinds: st.SearchStrategy[Step]) -> st.SearchStrategy[list[Step]]:
    during = st.one_of(waits, settles, extensions, *kinds)
    return st.lists(outages(during), min_size=1, max_size=3).map(
        lambda parts: [step for part in parts for step in part]
    )


@dataclass(eq=False)
class Running:
    reservation: Reservation
    ask: Ask  # with its extensions


class PaperName(ReplicaName):
    """A name kept by the test; new without a former life, or after one that had given it up."""

    def __init__(self, former: "PaperName | None") -> None:
        super().__init__()
        self._is_kept = True
        if former is not None and former._is_kept:
            self.id, self.first_ordinal = former.id, former.first_ordinal + LIFE_ORDINALS

    def give_up(self) -> bool:
        self._is_kept = False
        return True

    def keep(self) -> None:
        self._is_kept = True


@dataclass(eq=False)
class Life:
    """One replica from its start to its crash."""

    store: RedisStore
    wire: Wire
    name: "PaperName"
    running: list[Running] = field(default_factory=list)
    cut_at: int = 0


class World(ClockedTenant):
    """Three replicas of two tenants of a team, each on a wire of its own."""

    def __init__(self, runner: ScriptRunner, policy: Policy, ends_before_lease: bool = True) -> None:
        super().__init__(runner, policy, START)
        self._ends_before_lease = ends_before_lease  # of a cut replica, else others reclaim what it runs
        self.moves: dict[Limit, list[tuple[int, int]]] = {limit: [] for owner in OWNERS for limit in self.policy[owner]}
        self.spent: list[Usage] = []
        self.lives = [self._new_life(pace) for pace in PACES]

    async def live(self, steps: Steps) -> None:
        await super().live(steps)
        await self.mend(None)
        for life in self.lives:
            await self._end_all(life)
        await self.wait(round(LEASE * 1e6) * 3)

    async def reserve(self, index: int, key: str | None, ask: Ask, times: int) -> None:
        life, limits = self.lives[index], self.limits_of(key)
        for _ in range(times):
            try:
                reservation = await life.store.reserve(self.tenant_of(key), key, limits, ask, "lease")
            except (NeverFits, QuotaRefused, StoreUnavailable):
                return
            life.running.append(Running(reservation, ask))
            self._move(limits, ask, 1)
            await asyncio.sleep(0)

    async def extend(self, pick: int, more: int) -> None:
        for life, one in self._picked(pick):
            try:
                await life.store.extend(one.reservation, more)
            except (NeverFits, QuotaRefused, StoreUnavailable):
                continue
            one.ask = Ask(one.ask.requests, one.ask.input_tokens, one.ask.output_tokens + more)
            self._move(one.reservation.limits, Ask(0, 0, more), 1)

    async def settle(self, pick: int, output_tokens: int | None) -> None:
        for life, one in self._picked(pick):
            await self._end(life, one, output_tokens)

    async def wait(self, micros: int) -> None:
        while True:
            step = min(micros, BEAT)
            await self._advance(step)
            micros -= step
            if not micros:
                return

    async def cut(self, index: int | None) -> None:
        """What the store has granted ends first: what it takes for dead after the lease, it gives to others."""
        for life in self._chosen(index):
            if not life.wire.is_cut:
                if self._ends_before_lease:
                    await self._end_all(life)
                    await self._beat(life)
                life.wire.is_cut, life.cut_at = True, self.now

    async def mend(self, index: int | None) -> None:
        for life in self._chosen(index):
            life.wire.is_cut = False
            await self._beat(life)

    async def lose(self, index: int, answers: int) -> None:
        self.lives[index].wire.losses = answers

    async def crash(self, index: int) -> None:
        """What has ended was told the store, if it could be; what runs does no more."""
        life = self.lives[index]
        if not life.wire.is_cut:
            await self._beat(life)
        for one in life.running:
            self._move(one.reservation.limits, one.ask, -1)
            self.spent.append(Usage(requests=one.ask.requests))
        self.lives[index] = self._new_life(PACES[index], life.name)

    def check_flows(self) -> None:
        """admitted(t) <= burst + rate * t from any time on; a budget by period; what is held at once at any time."""
        for limit, moves in self.moves.items():
            match limit.window:
                case Rate():
                    _check_rate(limit, limit.window, moves)
                case Budget() as budget:
                    for current in {stretch(budget, moment) for moment, _ in moves}:
                        admitted = sum(cost for moment, cost in moves if stretch(budget, moment) == current)
                        assert admitted <= limit.amount
                case None:
                    assert all(sum(cost for _, cost in moves[: end + 1]) <= limit.amount for end in range(len(moves)))

    async def check_settled(self) -> None:
        """Nothing is held or set aside any more, and the ledger holds what was spent, neither more nor less."""
        team = f"team:{self.team}"
        for owner in (self.tenant, self.neighbour, team):
            assert not [name for name in await self.state(owner=owner) if name[:2] in {b"r:", b"s:"}]
        for key in OWNERS:
            suffix = f":key:{key}" if key in KEYS and key else ""
            levels = await self.state(suffix, owner=team if key == TEAM else self.tenant_of(key))
            for limit in self.policy[key]:
                if level := levels.get(limit.label.encode()):
                    used, _, _, aside = unpack("<dddd", level)
                    assert aside == 0
                    assert used == 0 or limit.window
        days = range(START // DAY, self.now // DAY + 1)
        found = [await booked(self.lives[0].store, tenant, days) for tenant in (self.tenant, self.neighbour)]
        assert sum(found, NOTHING) == sum(self.spent, NOTHING)

    async def _advance(self, duration: int) -> None:
        await super().wait(duration)
        for life in self.lives:
            if not life.wire.is_cut:
                await self._beat(life)
            elif self._ends_before_lease and self.now - life.cut_at > LEASE * 0.5e6:
                await self._end_all(life)  # else what is held at once would be held beyond the lease

    async def _beat(self, life: Life) -> None:
        """Until all answers that get lost are."""
        for _ in range(40):
            with suppress(StoreUnavailable):
                return await life.store.heartbeat()
        raise AssertionError("no heartbeat gets through")

    async def _end_all(self, life: Life) -> None:
        for one in list(life.running):
            await self._end(life, one, None)

    async def _end(self, life: Life, one: Running, output_tokens: int | None) -> None:
        """Its whole ask was used, or at most this much output."""
        life.running.remove(one)
        ask = one.ask
        output = ask.output_tokens if output_tokens is None else min(output_tokens, ask.output_tokens)
        usage = Usage(ask.input_tokens, output, requests=ask.requests, reasoning_tokens=output // 2)
        self.spent.append(usage)
        self._move([limit for limit in one.reservation.limits if limit.window is None], ask, -1)
        await life.store.settle(one.reservation, usage)

    def _move(self, limits: Sequence[Limit], ask: Ask, sign: int) -> None:
        for limit in limits:
            self.moves[limit].append((self.now, sign * ask.of(limit)))

    def _chosen(self, index: int | None) -> list[Life]:
        return self.lives if index is None else [self.lives[index]]

    def _picked(self, pick: int) -> list[tuple[Life, Running]]:
        running = [(life, one) for life in self.lives for one in life.running]
        return [running[pick % len(running)]] if running else []

    def _new_life(self, pace: float, former: "PaperName | None" = None) -> Life:
        wire, name = Wire(self.runner), PaperName(former)
        return Life(RedisStore(wire, LEASE, lambda: self.now / 1e6 * pace, name), wire, name)


def _check_rate(limit: Limit, rate: Rate, moves: list[tuple[int, int]]) -> None:
    for start, (begin, _) in enumerate(moves):
        admitted = 0
        for moment, cost in moves[start:]:
            admitted += cost
            assert admitted <= rate.burst + Fraction(limit.amount * (moment - begin), rate.seconds * 10**6)


policies = policies_of(OWNERS, amounts, held=(2, 30), most=2)
examples = settings(max_examples=examples(20, at_night=1000), deadline=None, suppress_health_check=list(HealthCheck))


@examples
@given(policy=policies_of(OWNERS, amounts, held=(2, 30), most=2, prices=[ONE_PRICE]), steps=histories(losses, crashes))
async def test_replicas_together_never_exceed_a_limit(runner: ScriptRunner, policy: Policy, steps: Steps) -> None:
    world = World(runner, policy)
    await world.live(steps)
    world.check_flows()


@examples
@given(policy=policies, steps=histories(losses, partial_settles), ends_before_lease=st.booleans())
async def test_cut_and_lost_requests_are_charged_and_booked_once(
    runner: ScriptRunner, policy: Policy, steps: Steps, ends_before_lease: bool
) -> None:
    world = World(runner, policy, ends_before_lease)
    await world.live(steps)
    await world.check_settled()


@examples
@given(
    policy=policies,
    lives=st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(KEYS), asks, st.integers(0, 9)), max_size=6),
            st.sampled_from([0, 10**6, 2 * BEAT, 4 * BEAT]),
            st.sampled_from([0, 10**6, 45 * 10**6]),
        ),
        min_size=1,
        max_size=4,
    ),
)
async def test_a_replica_that_is_killed_over_and_over_costs_its_tenant_what_was_used(
    runner: ScriptRunner,
    policy: Policy,
    lives: list[tuple[list[tuple[str | None, Ask, int]], int, int]],
) -> None:
    world = World(runner, policy)
    await world.wait(0)
    for asked, served, away in lives:
        for key, ask, output in asked:
            await world.reserve(0, key, ask, 1)
            if world.lives[0].running:
                await world._end(world.lives[0], world.lives[0].running[-1], output)
        await world.wait(served)
        await world.crash(0)
        await ClockedTenant.wait(world, away)
    for key in KEYS:
        await world.lives[0].store.states(world.tenant_of(key), key, world.limits_of(key))
    await world.check_settled()


async def test_a_dead_replicas_slice_does_not_bring_back_levels_that_have_expired(
    runner: ScriptRunner,
) -> None:
    month, rate = (
        Limit(Resource.TOKENS, 10**6, Budget(BudgetPeriod.MONTH)),
        Limit(Resource.TOKENS, 999, Rate(60, 999), "k1"),
    )
    world = World(runner, {None: [month], "k1": [rate]})
    await world.wait(0)
    await world.reserve(0, "k1", Ask(1, 50, 50), 1)
    await world.wait(BEAT)
    assert world.lives[0].store.set_aside()
    await world.cut(0)
    await ClockedTenant.wait(world, DAY)
    await runner.client.execute(b"DEL", f"sluice:{{{world.tenant}}}:key:k1".encode())
    await world.reserve(1, None, Ask(1, 1, 1), 1)
    assert await world.state(":key:k1") == {}


@pytest.mark.parametrize("key", [None, "k1"], ids=["of all keys", "of a key"])
async def test_after_a_policy_edit_a_tenant_is_granted_what_its_replica_set_aside_before(
    runner: ScriptRunner, key: str | None
) -> None:
    day = Limit(Resource.TOKENS, 100_000, Budget(BudgetPeriod.DAY), key)
    added = Limit(Resource.REQUESTS, 10**6, Rate(60, 10**6), key)
    world = World(runner, {None: [], "k1": [], key: [day]})
    await world.wait(3 * BEAT)  # into the next day
    store = world.lives[0].store
    for name in ("k1", "k2"):
        await store.settle(await store.reserve(world.tenant, name, (day,), Ask(1, 0, 3000), "lease"), NOTHING)
    await store.heartbeat()
    assert store.set_aside()["tokens"] >= 3000
    await store.reserve(world.tenant, "k1", (added, day), Ask(1, 0, 100_000), "lease")


async def test_dropping_idle_slices_leaves_the_tables_of_others(
    runner: ScriptRunner,
) -> None:
    limits = (Limit(Resource.TOKENS, 10_000, Rate(60, 10_000)),)
    now = START
    await runner.client.execute(b"SET", b"test:clock", b"%d" % now)
    store = RedisStore(runner, LEASE, lambda: now / 1e6)
    for tenant in range(20):
        await store.settle(await store.reserve(f"t{tenant}", None, limits, Ask(1, 1, 1), "lease"), Usage(1, 1))
    slices = store._fallback.slices
    tables = slices._slices, slices._of
    for _ in range(3):
        now += BEAT * 2
        await store.heartbeat()
    assert (slices._slices, slices._of) == ({}, {})
    assert slices._slices is tables[0] and slices._of is tables[1], "no table is made anew for each"
