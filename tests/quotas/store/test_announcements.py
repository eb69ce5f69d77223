from uuid import uuid4

import pytest
from redis.asyncio import Redis

from quotas.errors import StoreUnavailable
from quotas.store.announcements import Announcements
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.servers import connected, hanging


@pytest.fixture
def fleet() -> str:
    return uuid4().hex


async def test_announcements_are_read_by_all_replicas_until_they_leave(
    store: RedisStore, other: RedisStore, fleet: str
) -> None:
    one, reader = store.announcements(fleet), other.announcements(fleet)
    assert await reader.read() == ("", [])
    since = (await one.announce("a", b"first")).since
    await one.announce("b", b"second", life=60.0)
    assert await reader.read() == (since, [b"first", b"second"])
    await one.announce("a", b"elsewhere", life=120.0)
    assert await reader.read() == (since, [b"second", b"elsewhere"]), "the newest last"
    assert await store.announcements(f"{fleet}:{{x}}").read() == ("", []), "fleets know nothing of each other"
    await one.leave("a")
    await one.leave("nobody")
    assert await reader.read() == (since, [b"second"])


async def test_an_announcement_counts_until_its_time_is_over(runner: ScriptRunner, valkey_url: str, fleet: str) -> None:
    said = Announcements(runner, fleet)
    async with Redis.from_url(valkey_url) as redis:
        await redis.set("test:clock", 1_000_000)
        await said.announce("dead", b"dead", life=5.0)
        await redis.set("test:clock", 4_000_000)
        since, _ = await said.announce("live", b"live", life=5.0)
        assert since == "1000000"
        assert (await said.read()).said == [b"dead", b"live"]
        await redis.set("test:clock", 6_000_000)
        assert await said.read() == (since, [b"live"])


async def test_a_store_that_lost_the_list_says_that_it_is_another(url: str, fleet: str) -> None:
    async with connected(url) as store, Redis.from_url(url) as redis:
        said = store.announcements(fleet)
        since = (await said.announce("a", b"a")).since
        await redis.flushall()
        assert await said.read() == ("", [])
        assert (await said.announce("b", b"b")).since != since


async def test_a_store_that_does_not_answer_is_unavailable(url: str, fleet: str) -> None:
    async with connected(url) as store, hanging(url):
        with pytest.raises(StoreUnavailable):
            await store.announcements(fleet).announce("a", b"a")
