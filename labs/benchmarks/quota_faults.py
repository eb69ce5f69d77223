"""The cost of faults of the quota store to a gateway under load: `python -m labs.benchmarks.quota_faults`.

Two `sluice serve` with the embedded model on one Redis, closed loops of clients on both. One tenant has more than it
needs: each of its requests that is not answered is lost. Another is held to half of what it asks for: what it is
answered must stay within its burst and rate. The store is paused for 5 s, killed and started again empty, and flushed;
then one gateway is killed. A fault is healed when every gateway has the store again and the ample tenant is answered.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from labs.benchmarks import machine
from labs.benchmarks.redis_server import RedisServer
from labs.benchmarks.report import Report, scenario_parser
from labs.benchmarks.served import Served, served

AMPLE, TIGHT = "ample", "tight"
CLIENTS = 2  # of each tenant at each gateway
REQUESTS_PER_MINUTE, BURST_REQUESTS = 30, 60  # requests: a minute, and at once
LIMITS = {
    AMPLE: {"tokens": "1B/month", "concurrent_requests": 100},
    TIGHT: {"requests": {"rate": f"{REQUESTS_PER_MINUTE}/min", "burst": BURST_REQUESTS}, "concurrent_requests": 100},
}
LEASE_SECONDS = 10.0
CALM_SECONDS = 4.0  # before and after each fault
PAUSE_SECONDS, DOWN_SECONDS = 5.0, 1.0  # seconds
BODY = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}], "max_tokens": 8}
LONG = {**BODY, "max_tokens": 1500, "ignore_eos": True}
STREAMS = 3
TIMEOUT = 60.0


@dataclass(slots=True)
class Answers:
    """The answers of one tenant during one fault and its healing."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds


class Clients:
    """Send one request after the other until they are told to stop."""

    def __init__(self, gateways: list[Served]) -> None:
        self.gateways = gateways
        self.answers = {AMPLE: Answers(), TIGHT: Answers()}
        self.total: Counter[str] = Counter()
        self._http = httpx.AsyncClient(timeout=TIMEOUT)
        self._tasks = {
            gateway.port: [
                asyncio.create_task(self._loop(gateway, tenant)) for tenant in self.answers for _ in range(CLIENTS)
            ]
            for gateway in gateways
        }

    def turn(self) -> dict[str, Answers]:
        """The answers since the last turn."""
        past, self.answers = self.answers, {AMPLE: Answers(), TIGHT: Answers()}
        return past

    async def stop(self, gateway: Served) -> None:
        tasks = self._tasks.pop(gateway.port)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.gateways.remove(gateway)

    async def close(self) -> None:
        for gateway in list(self.gateways):
            await self.stop(gateway)
        await self._http.aclose()

    async def is_healed(self) -> bool:
        for gateway in self.gateways:
            ready = await self._http.get(f"http://127.0.0.1:{gateway.port}/readyz")
            if ready.json()["quota_store"] != "connected" or await self.status(gateway, AMPLE) != 200:
                return False
        return True

    async def held(self, gateway: Served, tenant: str) -> int:
        """Requests of the tenant that run, as this gateway is told by the store."""
        url = f"http://127.0.0.1:{gateway.port}/v1/limits"
        entries = (await self._http.get(url, headers=_headers(gateway, tenant))).json()["data"]
        return 100 - int(next(entry["remaining"] for entry in entries if entry["resource"] == "concurrent_requests"))

    async def _loop(self, gateway: Served, tenant: str) -> None:
        while True:
            sent = time.perf_counter()
            status = await self.status(gateway, tenant)
            answers = self.answers[tenant]
            answers.statuses[status] += 1
            answers.slowest = max(answers.slowest, time.perf_counter() - sent)
            self.total[tenant] += status == 200
            await asyncio.sleep(0.05 if status == 200 else 0.25)

    async def status(self, gateway: Served, tenant: str, body: Mapping[str, object] = BODY) -> int:
        """Return the status of the answer to one request; 0 when the connection broke."""
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        with suppress(httpx.HTTPError):
            return (await self._http.post(url, json=body, headers=_headers(gateway, tenant))).status_code
        return 0


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    options = parser.parse_args(arguments)
    report = Report("quota_faults", options.quick)
    core, _ = machine.two_cores()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder)
        store = stack.enter_context(RedisServer(directory))
        policy = directory / "policy.yaml"
        policy.write_text(json.dumps({"tenants": {name: {"limits": limits} for name, limits in LIMITS.items()}}))
        settings = {"redis_url": store.url, "policy": policy, "quota_lease": LEASE_SECONDS}
        gateways = [stack.enter_context(served(core, LIMITS, directory / str(i), **settings)) for i in range(2)]
        rows, admitted, allowed, freed = asyncio.run(_measure(gateways, store, 1.0 if options.quick else CALM_SECONDS))
    report.add_table("faults", rows)
    report.at_most("requests of the ample tenant lost", sum(float(str(row["lost"])) for row in rows), 0)
    report.at_most("answers of the tight tenant, of what its limit allows", admitted / allowed, 1)
    report.at_most("seconds until a killed gateway holds nothing", freed, LEASE_SECONDS + 2)
    return report.finish(options.results)


async def _measure(
    gateways: list[Served], store: RedisServer, calm: float
) -> tuple[list[dict[str, object]], float, float, float]:
    started = time.perf_counter()
    clients = Clients(list(gateways))
    await asyncio.sleep(2 * calm)
    clients.turn()
    rows = [
        await _fault(clients, name, fault, calm)
        for name, fault in (
            ("paused 5 s", lambda: _paused(store)),
            ("killed, started 1 s later", lambda: _restarted(store)),
            ("flushed", lambda: _flushed(store)),
        )
    ]
    admitted = clients.total[TIGHT]
    allowed = BURST_REQUESTS + REQUESTS_PER_MINUTE / 60 * (time.perf_counter() - started)
    freed = await _kill(clients, gateways[1], gateways[0])
    await clients.close()
    return rows, admitted, allowed, freed


async def _fault(clients: Clients, name: str, fault: Callable[[], Awaitable[None]], calm: float) -> dict[str, object]:
    await fault()
    over = time.perf_counter()
    await _until(clients.is_healed)
    healed = time.perf_counter() - over
    await asyncio.sleep(calm)
    answers = clients.turn()
    ample, tight = answers[AMPLE].statuses, answers[TIGHT].statuses
    return {
        "store": name,
        "answered": ample[200],
        "lost": sum(ample.values()) - ample[200],
        "slowest, s": answers[AMPLE].slowest,
        "tight: answered": tight[200],
        "tight: 429": tight[429],
        "tight: 503": tight[503],
        "time to heal, s": healed,
    }


async def _paused(store: RedisServer) -> None:
    store.pause()
    await asyncio.sleep(PAUSE_SECONDS)
    store.resume()


async def _restarted(store: RedisServer) -> None:
    store.kill()
    await asyncio.sleep(DOWN_SECONDS)
    await asyncio.to_thread(store.start)


async def _flushed(store: RedisServer) -> None:
    store.client.flushall()


async def _kill(clients: Clients, victim: Served, other: Served) -> float:
    """Seconds from its death, while it runs long answers, until the other one finds that nothing of it is held."""
    for gateway in (victim, other):
        await clients.stop(gateway)
    streams = [asyncio.create_task(clients.status(victim, AMPLE, LONG)) for _ in range(STREAMS)]

    async def is_held() -> bool:
        return await clients.held(other, AMPLE) == STREAMS

    async def is_free() -> bool:
        """The next request of a tenant reclaims dead replicas' reservations."""
        return await clients.status(other, AMPLE) == 200 and await clients.held(other, AMPLE) == 0

    await _until(is_held)
    os.kill(victim.pid, signal.SIGKILL)
    died = time.perf_counter()
    await asyncio.gather(*streams)
    await _until(is_free)
    return time.perf_counter() - died


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(0.02)


def _headers(gateway: Served, tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {gateway.keys[tenant]}"}


if __name__ == "__main__":
    sys.exit(main())
