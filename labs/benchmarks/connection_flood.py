"""The cost of strangers' connections to tenants: `python -m labs.benchmarks.connection_flood`.

`sluice serve` with the embedded model and its defaults. Another process holds 4,096 connections without a key:
silent, in the middle of a header, uploading, or idle after an answer. It opens one anew for each that is closed, 900
a second. Then it opens and closes them as fast as it can, and then sends a byte before it closes. Meanwhile a tenant
sends requests on a timetable, each on a connection of its own, and others on one that is kept; a stream runs, and
probes are asked on both ports. A quiet period comes before each.
"""

import asyncio
import multiprocessing
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from labs.benchmarks import machine
from labs.benchmarks.machine import on_core
from labs.benchmarks.processes import free_port
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served_afresh

CONNECTIONS = 4096
REOPENED_PER_SECOND = 900
PERIOD_SECONDS, SETTLING_SECONDS = 10.0, 3.0  # seconds
REQUESTS_PER_SECOND = 10.0  # requests of the tenant a second, each on a connection of its own
TIMEOUT = 20.0
TENANT = "tenant"
BODY = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}], "max_tokens": 8}
LONG = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
PROBE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
WAYS = (b"", PROBE[:-9], b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n{", PROBE)


def hold(port: int, count: int, stop: Event) -> None:
    """Keep `count` connections open, by all ways in turn, and replace closed ones."""
    poller, held = select.epoll(), dict[int, socket.socket]()
    num_opened, began = 0, time.monotonic()
    while not stop.is_set() and _has_parent():
        due = count + (time.monotonic() - began) * REOPENED_PER_SECOND
        while len(held) < count and num_opened < due:
            with suppress(OSError):
                opened = socket.create_connection(("127.0.0.1", port), TIMEOUT)
                opened.send(WAYS[num_opened % len(WAYS)])
                poller.register(opened, select.EPOLLIN)
                held[opened.fileno()] = opened
            num_opened += 1
        for number, _ in poller.poll(0.01):
            with suppress(OSError):
                if held[number].recv(65536):
                    continue
            held.pop(number).close()


def storm(sent: bytes, port: int, count: int, stop: Event) -> None:
    """Open, send and close as fast as it goes, `count` at most at once."""
    while not stop.is_set() and _has_parent():
        opened = []
        for _ in range(min(count, 64)):
            with suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", port), TIMEOUT))
        for connection in opened:
            with suppress(OSError):
                connection.send(sent)
            connection.close()


def _has_parent() -> bool:
    """False once the attacker's parent was killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


ATTACKS: dict[str, Callable[[int, int, Event], None]] = {
    "held": hold,
    "opened and closed": partial(storm, b""),
    "opened, begun and closed": partial(storm, PROBE[:1]),
}


@contextmanager
def attack(name: str, port: int, count: int, core: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=ATTACKS[name], args=(port, count, stop))
    with on_core(core):
        process.start()
    try:
        yield
    finally:
        stop.set()
        process.join()


@dataclass(slots=True)
class Seen:
    """The observations of a tenant and of a prober in one period."""

    lost: int = 0
    seconds: list[float] = field(default_factory=list)  # until an answer on a connection of its own was there
    probes_lost: int = 0
    cut: int = 0  # streams and kept connections

    @property
    def p50(self) -> float:
        return quantile(sorted(self.seconds), 0.5)

    @property
    def p99(self) -> float:
        return quantile(sorted(self.seconds), 0.99)


def _client(**options: Any) -> httpx.AsyncClient:
    """Trusts no authorities: loading them takes several times as long as an answer."""
    return httpx.AsyncClient(timeout=TIMEOUT, verify=False, **options)


class Tenant:
    """Sends requests for a while."""

    def __init__(self, gateway: Served, admin_port: int) -> None:
        self._ports = (gateway.port, admin_port)
        self._url = f"http://127.0.0.1:{gateway.port}"
        self._headers = {"authorization": f"Bearer {gateway.keys[TENANT]}"}

    async def watch(self, seconds: float) -> Seen:
        seen = Seen()
        until = time.monotonic() + seconds
        await asyncio.gather(*(does(seen, until) for does in (self._ask, self._keep, self._stream, self._probe)))
        return seen

    async def _ask(self, seen: Seen, until: float) -> None:
        """Send requests on a timetable (open loop); latency counts from the time that each was due."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while due < until:
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._ask_one(seen, due))
                due += 1 / REQUESTS_PER_SECOND

    async def _ask_one(self, seen: Seen, due: float) -> None:
        async with _client() as client:
            seen.lost += not await self._is_answered(client)
        seen.seconds.append(time.monotonic() - due)

    async def _keep(self, seen: Seen, until: float) -> None:
        """One connection, used twice a second; a client's own retry would hide that it was closed."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=TIMEOUT)
        async with _client(limits=limits) as client:
            while time.monotonic() < until:
                seen.cut += not await self._is_answered(client)
                await asyncio.sleep(0.5)

    async def _stream(self, seen: Seen, until: float) -> None:
        async with _client() as client:
            while time.monotonic() < until:
                last = ""
                with suppress(httpx.HTTPError):
                    async with client.stream(
                        "POST", f"{self._url}/v1/chat/completions", json=LONG, headers=self._headers
                    ) as reply:
                        async for line in reply.aiter_lines():
                            last = line or last
                seen.cut += last != "data: [DONE]"

    async def _probe(self, seen: Seen, until: float) -> None:
        while time.monotonic() < until:
            for port in self._ports:
                async with _client() as client:
                    try:
                        reply = await client.get(f"http://127.0.0.1:{port}/readyz")
                        seen.probes_lost += reply.status_code != 200
                    except httpx.HTTPError:
                        seen.probes_lost += 1
            await asyncio.sleep(0.2)

    async def _is_answered(self, client: httpx.AsyncClient) -> bool:
        with suppress(httpx.HTTPError):
            reply = await client.post(f"{self._url}/v1/chat/completions", json=BODY, headers=self._headers)
            return reply.status_code == 200
        return False


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument(
        "--connections", type=int, default=CONNECTIONS, help="that strangers hold (default: %(default)s)"
    )
    parser.add_argument("--http-workers", type=int, default=0, help="of the gateway (default: none)")
    options = parser.parse_args(arguments)
    report = Report("connection_flood", options.quick)
    count = 64 if options.quick else options.connections
    for name in ATTACKS:
        rows, flooded, ratios = [], [], []
        for _ in range(1 if options.quick else options.runs):
            seconds = PERIOD_SECONDS / 10 if options.quick else PERIOD_SECONDS
            quiet, seen, memory = _measure(name, count, seconds, options.http_workers)
            rows += [_row("quiet", quiet, None), _row("flooded", seen, memory / count)]
            flooded.append(seen)
            ratios.append(seen.p50 / quiet.p50)
        report.add_table(f"connections {name}", rows)
        report.at_most(f"{name}: requests lost", sum(seen.lost for seen in flooded), 0)
        report.at_most(f"{name}: streams and kept connections cut", sum(seen.cut for seen in flooded), 0)
        report.at_most(f"{name}: probes lost", sum(seen.probes_lost for seen in flooded), 0)
        report.at_most(f"{name}: time of an answer beside quiet, p50", Spread.of(ratios).median, 3)
    return report.finish(options.results)


def _measure(name: str, count: int, seconds: float, http_workers: int) -> tuple[Seen, Seen, float]:
    """A quiet period and a flooded one of a new gateway, and the bytes by which it grew between them."""
    core, other = machine.two_cores()
    admin_port = free_port()
    with TemporaryDirectory() as folder:
        limits = {"max_connections": count, "admin_port": admin_port, "http_workers": http_workers}
        with served_afresh(core, [TENANT], Path(folder), **limits) as gateway:
            tenant = Tenant(gateway, admin_port)
            quiet = asyncio.run(tenant.watch(seconds))
            before = _memory(gateway.pid)
            with attack(name, gateway.port, count, other):
                time.sleep(seconds if name == "held" else SETTLING_SECONDS)
                grown = _memory(gateway.pid) - before
                return quiet, asyncio.run(tenant.watch(seconds)), grown


def _memory(pid: int) -> float:
    """Return the resident bytes of the server."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return float(line.split()[1]) * 1024


def _row(period: str, seen: Seen, bytes_each: float | None) -> dict[str, object]:
    return {
        "period": period,
        "answers": len(seen.seconds) - seen.lost,
        "lost": seen.lost,
        "cut": seen.cut,
        "probes lost": seen.probes_lost,
        "p50 ms": seen.p50 * 1e3,
        "p99 ms": seen.p99 * 1e3,
        "longest ms": max(seen.seconds) * 1e3,
        "KiB a connection": "" if bytes_each is None else bytes_each / 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
