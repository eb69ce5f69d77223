"""Interactive requests beside a batch, live: `python -m labs.benchmarks.spare_live`.

`sluice serve` with the embedded model on one core, clients on another. A tenant streams answers on a timetable; windows
without a batch and beside one of the same tenant that does not end take turns, each pair with the same arrivals. The
times beside the batch are told over those without, medians over pairs; the same of each window without a batch over the
one before it is the machine's noise, which a bound allows for. A first token may wait for a step of the batch, as in
`spare`.
"""

import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import orjson

from admission.spare import SPARE_STEP_S
from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh
from labs.benchmarks.load import post
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served_afresh
from labs.benchmarks.traffic import Due, Traffic
from labs.faults.site import summed

TENANT = "people"
CHATS_PER_SECOND = 6.0
MOST = 1.05  # of the time without a batch, at the 99th percentile
LINES, LINE_TOKENS = 4000, 100  # more than a window computes


class Times(NamedTuple):
    """Seconds of one window, ascending."""

    first: list[float]  # token
    between: list[float]  # tokens
    busy: float  # share of the window in which the device computed


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=6)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each window")
    options = parser.parse_args(arguments)
    runs, seconds = (2, 1.5) if options.quick else (options.runs, options.seconds)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    report = Report("spare_live", options.quick)
    alone, again, beside = list[Times](), list[Times](), list[Times]()
    with TemporaryDirectory() as folder, served_afresh(server_core, [TENANT], Path(folder)) as server:
        batches = _Batches(server)
        _window(server, seconds, 0)  # warms up
        for seed in range(runs):
            alone.append(_window(server, seconds, seed))
            again.append(_window(server, seconds, seed))
            batch = batches.begin()
            beside.append(_window(server, seconds, seed))
            batches.cancel(batch)
    _judge(report, alone, again, beside)
    return report.finish(options.results)


def _judge(report: Report, alone: list[Times], again: list[Times], beside: list[Times]) -> None:
    rows = []
    for name, kind in (("none", alone), ("one that does not end", beside)):
        row: dict[str, object] = {"batch": name, "device busy": Spread.of([times.busy for times in kind])}
        for what, share in (("first", 0.5), ("first", 0.99), ("between", 0.5), ("between", 0.99)):
            spread = Spread.of([1e3 * quantile(getattr(times, what), share) for times in kind])
            row[f"{what} p{100 * share:g} ms"] = spread
        rows.append(row)
    report.add_table("a tenant's answers beside its batch", rows)
    for what, step in (("first", SPARE_STEP_S), ("between", 0.0)):
        before = [quantile(getattr(times, what), 0.99) for times in alone]
        after = [quantile(getattr(times, what), 0.99) - step for times in beside]
        ratio = Spread.of([one / other for one, other in zip(after, before, strict=True)])
        repeated = [quantile(getattr(times, what), 0.99) for times in again]
        noise = Spread.of([one / other for one, other in zip(repeated, before, strict=True)])
        report.notes.append(f"p99 {what}, over without a batch: {ratio}; the same window again without one: {noise}")
        report.at_most(f"p99 {what}, over without a batch", ratio.median, MOST * max(1.0, noise.median))


class _Batches:
    def __init__(self, server: Served) -> None:
        headers = {"authorization": f"Bearer {server.keys[TENANT]}"}
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{server.port}/v1", headers=headers, timeout=600)
        body = {"model": "embedded", "prompt": [5, 6, 7], "max_tokens": LINE_TOKENS, "ignore_eos": True}
        asked = {"method": "POST", "url": "/v1/completions", "body": body}
        lines = b"\n".join([orjson.dumps(asked | {"custom_id": str(number)}) for number in range(LINES)])
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", lines)}}
        self._file = self._ask("POST", "/files", **form)["id"]

    def begin(self) -> str:
        """Make a batch, and wait for its first line."""
        asked = {"input_file_id": self._file, "endpoint": "/v1/completions", "completion_window": "24h"}
        name: str = self._ask("POST", "/batches", json=asked)["id"]
        while not self._ask("GET", f"/batches/{name}")["request_counts"]["completed"]:
            time.sleep(0.05)
        return name

    def cancel(self, name: str) -> None:
        self._ask("POST", f"/batches/{name}/cancel")
        while self._ask("GET", f"/batches/{name}")["status"] != "cancelled":
            time.sleep(0.05)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        return self._http.request(method, path, **options).raise_for_status().json()


def _window(server: Served, seconds: float, seed: int) -> Times:
    busy = _busy(server)
    with Traffic(server.port) as clients:
        heard = clients.run(seconds, _chats(server, seconds, seed))
    gaps = [after - before for one in heard.exchanges for before, after in pairwise(one.events)]
    return Times(heard.waits(TENANT), sorted(gaps), (_busy(server) - busy) / heard.seconds)


def _chats(server: Served, seconds: float, seed: int) -> Iterator[Due]:
    random, at = Random(seed), 0.0
    messages = [{"role": "user", "content": f"{MARK}: count from 3 to 90."}]
    body = {"model": "embedded", "messages": messages, "stream": True, "max_tokens": 40, "ignore_eos": True}
    requests = Fresh(post("/v1/chat/completions", body, server.keys[TENANT]))
    while (at := at + random.expovariate(CHATS_PER_SECOND)) < seconds:
        yield Due(at, TENANT, next(requests))


def _busy(server: Served) -> float:
    """Seconds of the device so far."""
    metrics = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=60).text
    return summed(metrics)["sluice_device_busy_seconds_total"]


if __name__ == "__main__":
    sys.exit(main())
