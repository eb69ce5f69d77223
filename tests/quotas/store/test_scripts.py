from pathlib import Path

import pytest
from redis.asyncio import Redis

from quotas.errors import NotSent, StoreUnavailable
from quotas.policy.limit import Limit, Rate, Resource
from quotas.reservation import Ask, Usage
from quotas.store.redis_store import RedisStore
from tests.quotas.servers import connected, hanging, until_connected

LIMITS = (Limit(Resource.TOKENS, 1000, Rate(3600, 1000)),)

Told = tuple[str, bool, type[Exception] | None]


def watched(store: RedisStore) -> list[Told]:
    told: list[Told] = []
    store.on_command.append(
        lambda name, began, ended, error: told.append((name, 0 < began <= ended, type(error) if error else None))
    )
    return told


async def test_every_command_is_told_with_its_times_and_what_is_held_is_counted(url: str) -> None:
    async with connected(url) as store:
        told = watched(store)
        held = await store.reserve("a", None, LIMITS, Ask(1, 100, 100))
        assert store.num_unsettled == 1
        await store.settle(held, Usage(100, 50))
        assert told == [("reserve", True, None), ("settle", True, None)]
        assert store.num_unsettled == store.num_outages == 0


async def test_a_command_that_fails_is_told_and_an_outage_counts_once(url: str) -> None:
    async with connected(url) as store:
        told = watched(store)
        async with hanging(url):
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    await store.reserve("a", None, LIMITS, Ask(1, 100, 100))
        assert [(name, error) for name, _, error in told] == [
            ("reserve", StoreUnavailable),
            *[("reserve", NotSent)] * 2,
        ]
        assert store.num_outages == 1
        await until_connected(store)
        assert store.num_outages == 1


async def test_a_connection_that_is_made_anew_at_once_is_no_outage(url: str) -> None:
    async with connected(url) as store, Redis.from_url(url) as redis:
        await redis.client_kill_filter(_type="normal", skipme=True)
        await store.settle(await store.reserve("a", None, LIMITS, Ask(1, 100, 100)), Usage(100, 0))
        assert store.num_outages == 0


async def test_a_store_that_is_not_there_is_one_outage(tmp_path: Path) -> None:
    store = RedisStore.at(f"unix://{tmp_path}/none.sock")
    with pytest.raises(StoreUnavailable):
        await store.connect()
    assert store.num_outages == 1
    await store.close()
