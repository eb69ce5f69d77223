from datetime import UTC, datetime

import pytest
from redis import Redis

from quotas.errors import StoreUnsuitable
from quotas.policy.limit import Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.redis_store import RedisStore

COUNTED = (Limit(Resource.CONCURRENT_REQUESTS, 10),)
STRANGE = ["a:usage:20000", "{b}", "100% }{ ", "zürich", "*"]


@pytest.mark.parametrize("tenant", STRANGE)
async def test_a_ledger_is_found_whatever_the_tenants_name(store: RedisStore, tenant: str) -> None:
    today = datetime.now(UTC).date()
    await store.settle(await store.reserve(tenant, "k1", COUNTED, Ask(1, 5, 5)), Usage(5, 3))
    assert (tenant, today) in await store.ledgers() or (tenant, datetime.now(UTC).date()) in await store.ledgers()


async def test_other_keys_of_a_large_server_are_not_taken_for_ledgers(store: RedisStore, store_url: str) -> None:
    others = {f"other:{number}": "" for number in range(3000)}
    with Redis.from_url(store_url) as client:
        client.mset({**others, "sluice:{x}:usage:1e9": "", "sluice:{x}:usage:": "", "my:sluice:{x}:usage:7": ""})
        found = await store.ledgers()
        client.delete(*others, "sluice:{x}:usage:1e9", "sluice:{x}:usage:", "my:sluice:{x}:usage:7")
    assert "x" not in {tenant for tenant, _ in found}


async def test_a_user_that_may_not_list_keys_is_told_the_permission(store_url: str) -> None:
    with Redis.from_url(store_url) as client:
        client.acl_setuser("narrow", enabled=True, passwords=["+pw"], commands=["+@all", "-scan"], keys=["sluice:*"])
    store = RedisStore.at(f"{store_url.replace('://', '://narrow@')}?password=pw", timeout=5)
    await store.connect()
    with pytest.raises(StoreUnsuitable, match=r"\+scan"):
        await store.ledgers()
    assert await store.usage("nobody", datetime.now(UTC).date()) == {}
    await store.close()
