from collections import Counter
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from quotas.errors import StoreUnavailable
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import Script, ScriptRunner
from quotas.store.served_sums import LIFE_SECONDS, LIVE_SECONDS, ServedSums
from tests.examples import examples
from tests.quotas.paper_sums import PaperSums
from tests.quotas.servers import connected, hanging
from tests.quotas.wire import Wire


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fleet() -> str:
    return uuid4().hex


async def test_each_replica_reads_what_the_others_served(store: RedisStore, other: RedisStore, fleet: str) -> None:
    one, two, three = store.served_sums(fleet), other.served_sums(fleet), other.served_sums(fleet)
    for begun in (one, two, three):
        await begun.exchange({})
    assert await one.exchange({"a": 1.5, "b": 1.0}) == ({}, 3)
    assert await two.exchange({"a": 0.25}) == ({}, 3), "what is new to it is where it begins to count"
    assert await one.exchange({"a": 2.0}) == ({"a": 0.25}, 3), "what it has served is not"
    assert await three.exchange({}) == ({}, 3)
    assert await two.exchange({"b": 4.0}) == ({"a": 0.5}, 3)
    assert await one.exchange({"b": 1.0}) == ({"b": 4.0}, 3), "a has not changed, and what it served itself is its own"
    assert await three.exchange({}) == ({"b": 4.0}, 3)
    assert await three.exchange({}) == ({}, 3)


async def test_fleets_know_nothing_of_each_other(store: RedisStore, other: RedisStore, fleet: str) -> None:
    one, two = store.served_sums(fleet), other.served_sums(f"{fleet}:{{x}}")
    for total in (1.0, 2.0):
        assert await one.exchange({"a": total}) == ({}, 1)
        assert await two.exchange({"a": total}) == ({}, 1)


async def test_service_of_a_replica_that_is_gone_stays_in_the_sum(
    store_url: str, other: RedisStore, fleet: str
) -> None:
    lasting = other.served_sums(fleet)
    await lasting.exchange({"a": 1.0})
    async with connected(store_url) as store:
        await store.served_sums(fleet).exchange({"a": 2.0})
    await lasting.exchange({})
    async with connected(store_url) as store:
        again = store.served_sums(fleet)
        await again.exchange({"a": 0.5})
        assert (await lasting.exchange({})).served == {"a": 0.5}
        await again.exchange({"a": 0.75})
        assert (await lasting.exchange({})).served == {"a": 0.25}


async def test_a_lost_answer_counts_nothing_twice_and_loses_nothing(url: str, fleet: str) -> None:
    async with connected(url) as store, connected(url) as other:
        sums, reader = store.served_sums(fleet), other.served_sums(fleet)
        await sums.exchange({"a": 1.0})
        await reader.exchange({})
        await sums.exchange({"a": 2.0})
        await reader.exchange({})
        store.returned.clear()
        async with hanging(url):
            for total in (3.0, 4.0):
                with pytest.raises(StoreUnavailable):
                    await sums.exchange({"a": total, "b": total})
        await store.returned.wait()
        await sums.exchange({})
        await sums.exchange({})
        assert (await reader.exchange({})).served == {"a": 2.0}
        async with Redis.from_url(url) as redis:
            name = f"sluice:fleet:{{{fleet}}}:served"
            assert {key: int(total) for key, total in (await redis.hgetall(name)).items()} == {
                b"a": 4_000_000,
                b"b": 4_000_000,
            }


async def test_a_store_that_lost_everything_is_where_all_begin_again(url: str, fleet: str) -> None:
    async with connected(url) as store, connected(url) as other, Redis.from_url(url) as redis:
        one, two = store.served_sums(fleet), other.served_sums(fleet)
        for total in (1.0, 2.0, 3.0):
            await one.exchange({"a": total})
            await two.exchange({})
        await redis.flushall()
        await one.exchange({"a": 4.0})
        assert (await two.exchange({})).served == {}
        await one.exchange({"a": 6.0})
        assert (await two.exchange({})).served == {"a": 2.0}


async def test_expired_sums_are_forgotten(runner: ScriptRunner, fleet: str) -> None:
    clock, execute = Clock(), runner.client.execute

    async def at(seconds: float) -> None:
        clock.now = seconds
        await execute(b"SET", b"test:clock", b"%d" % (10**15 + seconds * 10**6))

    await at(0)
    gone, one, two = (ServedSums(runner, fleet, clock) for _ in range(3))
    for sums in (gone, one, two):
        await sums.exchange({"old": 1.0})
    await at(LIVE_SECONDS + 1)
    assert (await one.exchange({"new": 1.0})).replicas == 1, "the others were not heard of"
    assert (await two.exchange({})).replicas == 2
    for tick in range(1, 9):
        await at(tick * LIFE_SECONDS / 8 + LIVE_SECONDS)
        await one.exchange({"new": 1.0 + tick})
        assert (await two.exchange({})).served == {"new": 1.0}
    name = f"sluice:fleet:{{{fleet}}}:".encode()
    assert await execute(b"HKEYS", name + b"served") == [b"new"]
    assert len(await execute(b"HKEYS", name + b"replicas")) == 3, "two of them, and the version"
    await one.exchange({"old": 2.0})
    assert (await two.exchange({})).served == {}, "to it, it is new"
    for key in (b"served", b"changed", b"replicas"):
        assert 0 < int(await execute(b"PTTL", name + key)) <= LIFE_SECONDS * 1000


class LosesAnswers:
    """Does what it is called for; while `loses`, its caller does not hear of it."""

    def __init__(self, runner: ScriptRunner | PaperSums) -> None:
        self.runner, self.loses = runner, False

    async def call(self, script: Script, keys: tuple[bytes, ...], *arguments: bytes) -> list[bytes]:
        answer = await self.runner.call(script, keys, *arguments)
        if self.loses:
            raise StoreUnavailable("it did not answer")
        return answer


class Served:
    """What a replica serves, and learns that others did."""

    def __init__(self, runner: ScriptRunner | PaperSums, fleet: str) -> None:
        self.runner = LosesAnswers(runner)
        self.sums = ServedSums(self.runner, fleet, Clock())  # type: ignore[arg-type]
        self.totals: dict[str, int] = {}
        self.elsewhere: Counter[str] = Counter()

    async def exchange(self, tenant: str, more: int, loses: bool) -> None:
        self.totals[tenant] = self.totals.get(tenant, 0) + more
        self.runner.loses = loses
        try:
            self.elsewhere.update((await self.sums.exchange({tenant: self.totals[tenant] / 1e6})).served)
        except StoreUnavailable:
            assert loses


calls = st.tuples(
    st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 10**7), st.sampled_from(["", "", "begins", "loses"])
)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(calls, min_size=5, max_size=40))
async def test_the_script_does_what_it_does_on_paper_and_sums_never_fall(
    runner: ScriptRunner, calls: list[tuple[int, str, int, str]]
) -> None:
    """Replicas serve, begin anew under another name, and lose answers."""
    fleet, paper = uuid4().hex, PaperSums()
    await runner.client.execute(b"SET", b"test:clock", b"%d" % 10**15)
    replicas = [(Served(runner, fleet), Served(paper, fleet)) for _ in range(4)]
    key, before = f"sluice:fleet:{{{fleet}}}:served".encode(), {}
    for index, tenant, more, event in calls:
        if event == "begins":
            replicas[index] = Served(runner, fleet), Served(paper, fleet)
        for one in replicas[index]:
            await one.exchange(tenant, more, loses=event == "loses")
        words = await runner.client.execute(b"HGETALL", key)
        after = {name: int(total) for name, total in zip(words[::2], words[1::2], strict=True)}
        assert after == paper.sums
        assert all(after[name] >= total for name, total in before.items())
        before = after
    for index in range(4):
        for one in replicas[index]:
            await one.exchange("a", 0, loses=False)
        real, on_paper = replicas[index]
        assert real.elsewhere == on_paper.elsewhere


async def test_service_not_added_before_a_long_absence_is_added_once_after_it(
    store: RedisStore, other: RedisStore, fleet: str
) -> None:
    clock, wire = Clock(), Wire(store._runner)
    one, two = ServedSums(wire, fleet, clock), other.served_sums(fleet)
    for total in (1.0, 2.0):
        await two.exchange({"a": total})
    for lost, total in (("nothing was sent", 5.0), ("the answer was lost", 7.0)):
        wire.is_cut, wire.losses = lost == "nothing was sent", 1
        with pytest.raises(StoreUnavailable):
            await one.exchange({"a": total})
        clock.now += LIFE_SECONDS
        wire.is_cut, wire.losses = False, 0
        await one.exchange({})
    assert (await two.exchange({})).served == {"a": 7.0}
