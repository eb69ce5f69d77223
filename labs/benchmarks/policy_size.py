"""Policies of up to 90,000 tenants: `python -m labs.benchmarks.policy_size`.

What it takes in CPU seconds to read one, to read it again after an edit of one tenant, and to put that edit into force
in a gateway with a key and a ledger for each tenant; and for how long each question of the admin API holds the
gateway's event loop, as CPU time of the loop's thread between two of its turns.
"""

import asyncio
import gc
import http.client
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway.announcement import Ready
from gateway.api.service import Service
from gateway.app import run_gateway
from gateway.settings.machine import GC_THRESHOLDS
from gateway.settings.settings import Settings
from gateway.tenants.auth import new_key, pepper_of
from gateway.tenants.key_store import KeyStore
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.process_pool import process_pool
from quotas.policy.policy_diff import policy_diff
from quotas.policy.policy_file import PolicyReader
from quotas.reservation import Usage

SIZES = (100, 1_000, 10_000, 90_000)
JUDGED_TENANTS = 10_000  # tenants
TENANTS_PER_FILE = 20_000  # tenants
LEDGERS = 10_000  # at most, all of today
BOOKED_AT_ONCE = 50
PREFIX = "/admin/v1"
QUESTIONS = (
    "overview",
    "tenants",
    "tenants?contains=t0000",
    "tenants/t00007",
    "requests",
    "queue",
    "kv",
    "policy",
    "policy?contains=t0000",
    "policy/text",
    "keys",
    "keys?contains=t0000",
    "refusals",
    "usage",
    "usage?by=key",
    "usage.csv",
    "budgets",
    "audit",
    "diagnosis",
    "state",
    "metrics",
)
Sources = dict[str, bytes]


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=3).parse_args(arguments)
    report = Report("policy_size", options.quick)
    sizes, runs = (SIZES[:2], 1) if options.quick else (SIZES, options.runs)
    report.add_table("reading, CPU seconds", [row for size in sizes for row in _reading(size, runs)])
    served = [_in_a_process(_serve, size) for size in sizes]
    report.add_table("a gateway, CPU seconds", [in_force for in_force, _ in served])
    holds = dict(zip(sizes, (held for _, held in served), strict=True))
    report.add_table(
        "the loop held by one question, ms of CPU",
        [{"question": name} | {f"{size:,}": holds[size][name] for size in sizes} for name in holds[sizes[0]]],
    )
    if not options.quick:
        _judge(report)
    return report.finish(options.results)


def _judge(report: Report) -> None:
    for row in report.tables["reading, CPU seconds"]:
        if row["tenants"] == JUDGED_TENANTS:
            report.at_most(f"{JUDGED_TENANTS:,} tenants, {row['texts']}: s to read", _median(row["first"]), 1.0)
        report.at_most(f"{row['tenants']:,} tenants, {row['texts']}: s to read an edit", _median(row["an edit"]), 0.2)
    for row in report.tables["the loop held by one question, ms of CPU"]:
        report.at_most(
            f"{JUDGED_TENANTS:,} tenants: ms of {row['question']}", float(str(row[f"{JUDGED_TENANTS:,}"])), 5.0
        )


def _median(value: object) -> float:
    assert isinstance(value, Spread)
    return value.median


def tenants(number: int, of_its_own: bool) -> Sources:
    """The files of a policy: each tenant with amounts of its own, or with one of forty plans."""
    files = {}
    for first in range(0, number, TENANTS_PER_FILE):
        indices = range(first, min(number, first + TENANTS_PER_FILE))
        texts = (_tenant(index, index if of_its_own else index % 40) for index in indices)
        files[f"{first:06}.yaml"] = ("tenants:\n" + "".join(texts)).encode()
    return files


def _tenant(index: int, plan: int) -> str:
    limits = f"requests: {60 + plan}/min, tokens: [{100 + plan}k/min, {5 + plan % 40}M/month], concurrent_requests: 8"
    return f"  t{index:05}:\n    weight: {1 + plan % 4}\n    limits: {{{limits}}}\n"


def edited(sources: Sources, weight: int) -> Sources:
    name = next(iter(sources))
    before, after = (f"t00007:\n    weight: {number}\n".encode() for number in (4, weight))
    assert before in sources[name]
    return sources | {name: sources[name].replace(before, after)}


def _reading(number: int, runs: int) -> list[dict[str, object]]:
    return [
        {"tenants": number, "texts": texts, **_in_a_process(_times_of_reading, number, of_its_own, runs)}
        for texts, of_its_own in (("each its own", True), ("40 plans", False))
    ]


def _in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Each measurement begins with an empty heap."""
    with process_pool(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _times_of_reading(number: int, of_its_own: bool, runs: int) -> dict[str, object]:
    gc.set_threshold(*GC_THRESHOLDS)
    sources = tenants(number, of_its_own)
    first, again, diff = list[float](), list[float](), list[float]()
    for run in range(runs):
        reader = PolicyReader()
        gc.collect()
        before = _timed(first, reader.parse, sources)
        after = _timed(again, reader.parse, edited(sources, 5 + run))
        assert len(_timed(diff, policy_diff, before, after)) == 2
    return {"first": Spread.of(first), "an edit": Spread.of(again), "its diff": Spread.of(diff)}


def _timed(times: list[float], work: Callable[..., Any], *arguments: object) -> Any:
    began = time.process_time()
    result = work(*arguments)
    times.append(time.process_time() - began)
    return result


@dataclass(slots=True)
class Turns:
    """The longest turn of an event loop, in seconds of its thread's CPU time."""

    longest: float = 0.0

    async def watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest, last = max(self.longest, now - last), now


def _serve(number: int) -> tuple[dict[str, object], dict[str, float]]:
    """Run a gateway in this process until it has answered; returns the cost of applying the policy, and the loop's
    holds in ms.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        asked, asking = _Asked(Path(folder), number), list[Future[None]]()

        def started(ready: Ready) -> None:
            asking.append(pool.submit(asked.ask_all, ready))
            asking[0].add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))

        run_gateway(asked.settings, started)
        asking[0].result()
    return asked.in_force, asked.held


class _Asked:
    """Asks a gateway of this process, from a thread."""

    def __init__(self, folder: Path, number: int) -> None:
        self.in_force: dict[str, object] = {"tenants": number}
        self.held: dict[str, float] = {}
        self._policy, self._number = folder / "policy", number
        self._policy.mkdir()
        self._sources = tenants(number, of_its_own=True)
        self._write(self._sources)
        self.settings = Settings(
            policy=self._policy, state_dir=folder / "state", port=0, admin_port=0, log_level="error", http_workers=0
        )
        self._store = KeyStore(self.settings.state_dir)
        pepper = pepper_of(self.settings, self._store)
        with self._store.edit() as records:
            for index in range(number):
                _, record = new_key(f"t{index:05}", pepper)
                records[record.id] = record
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        follow = Service.follow_policies

        async def followed(service: Service) -> None:
            self._service, self._loop = service, asyncio.get_running_loop()
            await follow(service)

        Service.follow_policies = followed  # type: ignore[method-assign]

    def _write(self, sources: Sources) -> None:
        for name, content in sources.items():
            half_written = self._policy.parent / name
            half_written.write_bytes(content)
            half_written.replace(self._policy / name)

    def ask_all(self, ready: Ready) -> None:
        self._in_loop(self._book())
        for question in QUESTIONS:
            path = f"{PREFIX}/{question}" if question != "metrics" else "/metrics"
            self._held(question, partial(self._ask, ready, "GET", path))
        key = {"tenant": "t00003"}
        self._held("keys, one made", lambda: self._ask(ready, "POST", f"{PREFIX}/keys", key))
        text = {"text": "tenants:\n  t00007: {weight: 9}\n"}
        self._held("policy/check", lambda: self._ask(ready, "POST", f"{PREFIX}/policy/check", text))
        self.in_force["an edit of one"] = self._reload(ready, edited(self._sources, 9))
        self._write(edited(self._sources, 7))
        self._held("policy/reload", lambda: self._ask(ready, "POST", f"{PREFIX}/policy/reload"))
        self.in_force["of the defaults"] = self._reload(ready, {"defaults.yaml": b"defaults: {max_n: 7}\n"})

    def _reload(self, ready: Ready, files: Sources) -> float:
        """Return the CPU seconds until an edit is in force."""
        self._write(files)
        began = time.process_time()
        self._ask(ready, "POST", f"{PREFIX}/policy/reload")
        return round(time.process_time() - began, 3)

    def _held(self, name: str, ask: Callable[[], None]) -> None:
        turns = Turns()
        watch = asyncio.run_coroutine_threadsafe(turns.watch(), self._running)
        time.sleep(0.1)  # what came before is over
        turns.longest = 0.0
        ask()
        watch.cancel()
        self.held[name] = round(turns.longest * 1e3, 2)

    @property
    def _running(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def _in_loop(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._running).result()

    async def _book(self) -> None:
        """Have the store keep a ledger of each tenant."""
        assert self._service is not None
        store, used = self._service.quotas.store, Usage(100, 50, 10, 1000.0)
        for first in range(0, min(self._number, LEDGERS), BOOKED_AT_ONCE):
            for index in range(first, min(self._number, first + BOOKED_AT_ONCE)):
                store.book(f"t{index:05}", None, used)
            store.returned.set()  # the gateway's own heartbeat sends them: two at once would book a batch twice
            while store.ledger._open or store.ledger._closed:  # noqa: ASYNC110 - a ledger has no event
                await asyncio.sleep(0.001)

    def _ask(self, ready: Ready, method: str, path: str, body: object = None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", ready.admin_port or 0, timeout=600)
        headers = {"authorization": f"Bearer {self._store.admin_key()}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path} was answered {answer.status}: {content[:200]!r}")


if __name__ == "__main__":
    sys.exit(main())
