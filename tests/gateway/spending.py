"""What tenants are made to have used, in a store that commands are then asked about."""

import asyncio
from datetime import UTC, date, datetime, time

from redis import Redis

from quotas.policy.limit import Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner, load_scripts
from tests.quotas.servers import TEST_CLOCK

COUNTED = (Limit(Resource.CONCURRENT_REQUESTS, 1000),)


def spend(
    url: str,
    tenant: str,
    key: str | None = None,
    usage: Usage | None = None,
    limits: tuple[Limit, ...] = COUNTED,
    day: date | None = None,
) -> None:
    """Reserve and settle this usage, by the store's clock or on a day."""
    asyncio.run(_spend(url, tenant, key, usage or Usage(10, 5), limits, day))


async def _spend(
    url: str, tenant: str, key: str | None, usage: Usage, limits: tuple[Limit, ...], day: date | None
) -> None:
    if day is not None:
        with Redis.from_url(url) as client:
            client.set("test:clock", round(datetime.combine(day, time(12), UTC).timestamp() * 1e6))
    runner = ScriptRunner(url, 5.0, load_scripts({"clock": TEST_CLOCK} if day else None))
    store = RedisStore(runner)
    await store.connect()
    ask = Ask(usage.requests, usage.input_tokens, usage.output_tokens)
    await store.settle(await store.reserve(tenant, key, limits, ask), usage)
    await store.close()
