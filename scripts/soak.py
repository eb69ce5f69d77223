"""Holds a gateway under mixed load and sees whether anything grows: `python -m scripts.soak [--minutes 10]`.

`sluice serve` with the embedded model and its own quota store, and clients that do everything at once: answers whole
and streamed, streams left halfway, connections cut at any byte, bodies that are malformed or too large, strange keys,
tenants at their limits, stored responses, also in the background, conversations, messages, grammars that nobody else
sends, batches, keys that live for one request, an admin who looks and cancels, edits of the policy, traces to a
collector. Now and then the
network between them delays, holds, refuses or cuts every connection for up to a second.

At intervals the load holds still until the gateway has nothing to do, and what it holds is read from its metrics: a row
of the table. Then nothing of the requests may be left: no KV block, no reservation, no span, no connection. What a
process keeps (memory, descriptors, threads, tasks) is flat when its median over the last quarter of the rows is at most
what it was over the second, plus a tolerance; the first quarter is warm-up. Writes `soak.json`; exits with 1 when
something is left or grows, and when a client was told what it should not have been.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median

import httpx

from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from labs.benchmarks.report import Report, scenario_parser
from labs.faults.proxy import Proxy
from labs.faults.site import logged_errors, summed
from scripts.soak_dialects import DIALECTS
from scripts.soak_load import ANSWER_TIMEOUT_SECONDS, BROKEN, CHATS, POLICY, TENANTS, Visitor
from tests.gateway.server_process import ServerProcess, running_server
from tests.gateway.telemetry.otlp_receiver import Receiver, otlp_receiver

CLIENTS = 16  # at a time; half as many sequences run
ROWS = 40
FAULT_SECONDS = 2.0  # between two faults of the network, on average
SETTLE_SECONDS = 30.0  # in which a gateway without load must have nothing left
FLAGS = (
    *("--threads", "1", "--max-num-seqs", "8", "--max-waiting", "12", "--trace-sample-ratio", "0.5"),
    *("--speculate", "lookup", "--machine-price", "2 EUR/h"),
)
MANNERS = {**CHATS, **DIALECTS}

LEFT = {  # by column: the metric, which is 0 without load
    "live": "sluice_live_requests",
    "connections": "sluice_connections",
    "KV blocks": "sluice_kv_blocks_used",
    "reservations": "sluice_reservations_outstanding",
    "orphans": "sluice_orphans",
    "stalled writes": "sluice_stalled_writes",
    "spans": "sluice_spans_waiting",
}
KEPT = {  # by column: the metric, and by what share and how much more it may be in the last quarter than in the second
    "RSS, MiB": ("process_resident_memory_bytes", 0.02, 4.0),
    "descriptors": ("process_open_fds", 0.0, 1.0),
    "threads": ("process_threads", 0.0, 1.0),
    "tasks": ("sluice_tasks", 0.0, 1.0),
}
DROPPED = "sluice_spans_dropped_total"

Row = dict[str, float]


@dataclass
class Gate:
    """Clients pass between two requests, while it is open."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    inside: int = 0
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self) -> None:
        """Close the gate, and return once no client is inside."""
        self.opened.clear()
        await self.empty.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    minutes = 0.5 if options.quick else options.minutes
    report = Report("soak", options.quick)
    with (
        tempfile.TemporaryDirectory() as directory,
        otlp_receiver() as collector,
        gateway(Path(directory), collector) as (server, keys),
        Proxy(server.port) as network,
    ):
        reached = replace(server, port=network.port)
        visitor = Visitor(reached, keys, Path(directory) / "policy.yaml", Random(options.seed), new_client())
        rows = asyncio.run(soak(visitor, network, collector, 60 * minutes))
        complaints = complaints_in(server.log)
    tell(report, rows, visitor)
    judge(report, rows, visitor.wrong, complaints)
    return report.finish(options.results)


@contextmanager
def gateway(directory: Path, collector: Receiver) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """A server and its tenants' keys. It has to stop in order at the end."""
    policy = directory / "policy.yaml"
    policy.write_text(POLICY.format(weight=1))
    store, keys = KeyStore(directory / "state"), {}
    for tenant in TENANTS:
        keys[tenant], record = new_key(tenant, store.pepper())
        store.add(record)
    flags = (*FLAGS, "--policy", str(policy), "--otlp-endpoint", collector.grpc_endpoint)
    with running_server(directory, *flags) as server:
        yield server, keys
    assert server.process.returncode == 0, f"it ended with status {server.process.returncode}"


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=ANSWER_TIMEOUT_SECONDS, limits=httpx.Limits(max_connections=None))


async def soak(visitor: Visitor, network: Proxy, collector: Receiver, seconds: float) -> list[Row]:
    """The rows of the table, which is printed as it grows."""
    gate, rows, began = Gate(), [], time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(come_and_go(visitor, gate)) for _ in range(CLIENTS)]
        tasks.append(group.create_task(disturb(network, visitor.random)))
        for number in range(1, ROWS + 1):
            gate.opened.set()
            await asyncio.sleep(max(0.0, began + seconds * number / ROWS - time.monotonic()))
            busy = await metrics(visitor)
            await gate.close()
            await visitor.http.aclose()
            visitor.http = new_client()
            rows.append(row(time.monotonic() - began, busy, await settled(visitor), visitor))
            show(rows)
            collector.requests.clear()
        for task in tasks:
            task.cancel()
    await visitor.http.aclose()
    return rows


async def come_and_go(visitor: Visitor, gate: Gate) -> None:
    manners, weights = list(MANNERS), list(MANNERS.values())
    while True:
        await gate.opened.wait()
        (manner,) = visitor.random.choices(manners, weights)
        gate.inside += 1
        gate.empty.clear()
        try:
            await manner(visitor)
        except (httpx.HTTPError, OSError) as error:
            expected = () if isinstance(error, httpx.TimeoutException) else (BROKEN,)
            visitor.note(f"{manner.__name__}: {type(error).__name__}", BROKEN, expected)
        finally:
            gate.inside -= 1
            if not gate.inside:
                gate.empty.set()


async def disturb(network: Proxy, random: Random) -> None:
    """Break the network now and then, and mend it."""
    while True:
        await asyncio.sleep(random.expovariate(1 / FAULT_SECONDS))
        await asyncio.to_thread(random.choice((network.cut, network.hold, network.refuse, network.delay)))
        await asyncio.sleep(random.random())
        await asyncio.to_thread(network.clear)


async def settled(visitor: Visitor) -> Row:
    """The metrics once no leftovers are left, or after `SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await metrics(visitor)
        if not any(found[name] for name in LEFT.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


async def metrics(visitor: Visitor) -> Row:
    """By name, summed over labels."""
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_SECONDS) as client:
        reply = await client.get(f"{visitor.server.admin_url}/metrics", headers=visitor.server.admin_headers)
    return summed(reply.text)


def row(seconds: float, busy: Row, quiet: Row, visitor: Visitor) -> Row:
    cells: Row = {"minute": round(seconds / 60, 2), "requests": float(sum(visitor.statuses.values()))}
    cells |= {"busy: live": busy["sluice_live_requests"], "busy: KV blocks": busy["sluice_kv_blocks_used"]}
    for column, (name, _, _) in KEPT.items():
        cells[column] = quiet[name] / 2**20 if name.endswith("bytes") else quiet[name]
    cells |= {column: quiet[name] for column, name in LEFT.items()}
    return cells | {"spans dropped": quiet[DROPPED]}


def show(rows: Sequence[Row]) -> None:
    if len(rows) == 1:
        print("  ".join(rows[0]))
    print("  ".join(f"{value:>{len(name)}.5g}" for name, value in rows[-1].items()), flush=True)


def tell(report: Report, rows: list[Row], visitor: Visitor) -> None:
    answers = {f"{what} {status}": count for (what, status), count in sorted(visitor.statuses.items())}
    report.add_table(
        "what clients were told (0: they did not stay; -1: the network broke; -2: a stream without an end)",
        [{"": k, "times": n} for k, n in answers.items()],
    )
    report.tables["what the gateway held while nothing was asked of it"] = [dict(row) for row in rows]
    report.notes = [f"{CLIENTS} clients, {sum(visitor.statuses.values()):,} requests in {rows[-1]['minute']:.3g} min"]


def judge(report: Report, rows: list[Row], wrong: Counter[tuple[str, int]], complaints: list[str]) -> None:
    for column in (*LEFT, "spans dropped"):
        report.at_most(f"{column} left, at most", max(row[column] for row in rows), 0)
    for column, (_, share, more) in KEPT.items():
        before, after = (median(row[column] for row in part) for part in quarters(rows))
        report.at_most(f"{column}: median of the last quarter", after, before * (1 + share) + more)
    report.at_most("answers that should not be", wrong.total(), 0)
    report.at_most("errors in the log", len(complaints), 0)
    report.notes += [f"should not be: {what} {status}, {times} times" for (what, status), times in wrong.items()]
    report.notes += [f"in the log: {message[:200]}" for message in complaints[:20]]


def quarters(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The second and the last."""
    size = len(rows) // 4
    return rows[size : 2 * size], rows[-size:]


def complaints_in(log: Path) -> list[str]:
    """Errors that the gateway logged, but for those about edits of its policy, which are meant to be wrong."""
    errors = logged_errors(log.read_text().splitlines())
    return [error["message"] for error in errors if error["logger"] != "gateway.tenants.live_policy"]


if __name__ == "__main__":
    sys.exit(main())
