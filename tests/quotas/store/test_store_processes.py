"""Four processes spend one limit at once: together they get it all, and no more."""

import subprocess
import sys
from uuid import uuid4

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
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    spent = sum(int(process.communicate()[0]) for process in processes)
    assert 0.98 * LIMIT <= spent <= LIMIT
