"""Hostile requests' effect on a neighbour, live: `python -m labs.benchmarks.hostile_bodies`.

`sluice serve` with the embedded model on one core, clients on another, real HTTP. A tenant sends short chats on a
timetable. Beside it eight connections send refused requests, one kind after the other: bodies of 4 MiB with very many
elements, wrong keys, small bad requests. Quiet and hostile windows alternate, so that the machine's other work falls on
both. Then beside it, in turn: a tenant that keeps all slots busy in closed loops, one with four times as many clients,
and the same clients with 64 stop strings each, which the text always begins and never ends; clients that ask for
responses in the background as fast as they are answered, for embeddings of 2,048 inputs, and for batches of 50,000
lines of which the last is malformed. These are admitted, and their bound is that of fairness: at most twice the cost of
a tenant that only keeps the slots busy, as in `flood`.
"""

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import orjson

from labs.benchmarks import machine
from labs.benchmarks.embeddings import save_encoder
from labs.benchmarks.fresh import MARK, Fresh
from labs.benchmarks.hostile_flood import CHAT
from labs.benchmarks.load import post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served_afresh
from labs.benchmarks.traffic import ClosedLoop, Due, Traffic

SLOTS = 16
NEIGHBOUR, HOSTILE = "neighbour", "hostile"
CHATS_PER_SECOND = 12.0  # chats of the neighbour a second
CLIENTS = {
    "behaved": SLOTS,
    "decode flood": 4 * SLOTS,
    "many stops": 4 * SLOTS,
    "background responses": 4 * SLOTS,
    "huge embeddings": 8,
    "failing batches": 8,
}
BATCH_LINES = 50_000
REFUSALS = (400, 401, 413, 429, 503)
SETTINGS = {"max_num_seqs": SLOTS, "max_waiting": 100_000, "overload": "unbounded"}
MAX_STOPS_RATIO = 1.25  # of many stops beside none: noise, and the one automaton

Figure = Callable[[list[float]], float]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window; a run has two for each kind")
    parser.add_argument("--kinds", nargs="*", help="of hostile requests; all")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 1.0
    report = Report("hostile_bodies", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    with (
        TemporaryDirectory() as directory,
        served_afresh(
            server_core,
            (NEIGHBOUR, HOSTILE),
            Path(directory) / "state",
            embedding_model=save_encoder(Path(directory) / "encoder"),
            **SETTINGS,
        ) as server,
    ):
        _window(server, options.seconds, 0)  # warms up
        with Worker.module(
            "labs.benchmarks.hostile_flood", str(server.port), server.keys[HOSTILE], core=load_core
        ) as flood:
            _tell_refused(report, options, server, flood)
        _tell_admitted(report, options, server)
    return report.finish(options.results)


def _tell_refused(report: Report, options: Namespace, server: Served, flood: Worker) -> None:
    rows: list[dict[str, object]] = []
    ratios = {}
    for kind in options.kinds or flood.ready["kinds"]:
        quiet, hostile, statuses = list[list[float]](), list[list[float]](), Counter[str]()
        for run in range(options.runs):
            quiet.append(_window(server, options.seconds, run))
            flood.ask(kind)
            hostile.append(_window(server, options.seconds, run))
            statuses.update(flood.ask(None))
        ratio = Spread.of([_p99(ours) / _p99(theirs) for ours, theirs in zip(hostile, quiet, strict=True)])
        ratios[kind] = ratio.median
        rows.append({"beside": kind, **_figures(quiet, hostile), "p99, ratio": ratio, "answers": dict(statuses)})
    report.add_table("the neighbour's time to first token in ms, quiet and beside eight connections", rows)
    worst = max(ratios, key=lambda kind: ratios[kind])
    report.at_most(
        f"p99 beside refused requests, times that of quiet windows; the worst kind, {worst}", ratios[worst], 2
    )


def _tell_admitted(report: Report, options: Namespace, server: Served) -> None:
    waits: dict[str, list[list[float]]] = {name: [] for name in CLIENTS}
    for run in range(options.runs):
        for name, clients in CLIENTS.items():
            loops = {HOSTILE: ClosedLoop(clients, _answers(server, name))}
            waits[name].append(_window(server, 2 * options.seconds, run, loops))
    rows: list[dict[str, object]] = []
    for name, windows in waits.items():
        rows.append({"beside": name, "p50 ms": _spread(windows, median), "p99 ms": _spread(windows, _p99)})
    report.add_table("the neighbour's time to first token in ms, beside a tenant whose requests are admitted", rows)
    behaved, flood, stops = waits["behaved"], waits["decode flood"], waits["many stops"]
    for name in ("background responses", "huge embeddings", "failing batches"):
        report.at_most(f"p99 beside a flood of {name}, likewise", _ratio(waits[name], behaved, _p99), 2)
    report.at_most("p99 beside a decode flood, times that beside a behaved tenant", _ratio(flood, behaved, _p99), 2)
    report.at_most("p99 beside a flood of many stops, likewise", _ratio(stops, behaved, _p99), 2)
    report.at_most("p50 beside many stops, times that beside none", _ratio(stops, flood, median), MAX_STOPS_RATIO)


def _window(server: Served, seconds: float, seed: int, loops: dict[str, ClosedLoop] | None = None) -> list[float]:
    """The neighbour's waits in seconds; a request without a token in the window counts with its wait until its end."""
    with Traffic(server.port, REFUSALS) as clients:
        return clients.run(seconds, _chats(server, seconds, seed), loops).waits(NEIGHBOUR)


def _chats(server: Served, seconds: float, seed: int) -> Iterator[Due]:
    random, at = Random(seed), 0.0
    requests = _chats_of(server.keys[NEIGHBOUR], f"{MARK}: count from 3 to 6.", max_tokens=8)
    while (at := at + random.expovariate(CHATS_PER_SECOND)) < seconds:
        yield Due(at, NEIGHBOUR, next(requests))


def _answers(server: Served, name: str) -> Iterator[bytes]:
    """Long answers; every stop begins as the text goes on, and ends as it never does."""
    key, text = server.keys[HOSTILE], f"{MARK}: count from 3 to 90."
    if name == "background responses":
        body = {"model": "embedded", "input": text, "background": True, "max_output_tokens": 300, "ignore_eos": True}
        return Fresh(post("/v1/responses", body, key))
    if name == "huge embeddings":
        return Fresh(post("/v1/embeddings", {"model": "encoder", "input": [f"{MARK} one two three"] * 2048}, key))
    if name == "failing batches":
        file = _file_of_lines(server, key)
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return Fresh(post("/v1/batches", {**body, "metadata": {"mark": MARK}}, key))
    has_stops = name == "many stops"
    stops = [f"{' ' * (number % 2)}{number % 10}, {number}!" * 40 for number in range(64)] if has_stops else None
    return _chats_of(server.keys[HOSTILE], text, max_tokens=300, ignore_eos=True, stop=stops)


def _file_of_lines(server: Served, key: str) -> str:
    """The id of an uploaded input of a batch that fails at its last line."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "embedded", "prompt": "Hi", "max_tokens": 1}}
    text = b"\n".join([orjson.dumps(line | {"custom_id": str(number)}) for number in range(BATCH_LINES - 1)] + [b"{"])
    form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", text)}, "timeout": 600}
    url, headers = f"http://127.0.0.1:{server.port}/v1/files", {"authorization": f"Bearer {key}"}
    name: str = httpx.post(url, headers=headers, **form).raise_for_status().json()["id"]  # type: ignore[arg-type]
    return name


def _chats_of(key: str, text: str, **fields: object) -> Fresh:
    messages = [{"role": "user", "content": text}]
    body = {"model": "embedded", "messages": messages, "temperature": 0, "stream": True, **fields}
    return Fresh(post(CHAT, body, key))


def _figures(quiet: list[list[float]], hostile: list[list[float]]) -> dict[str, object]:
    return {
        "p50 ms, quiet": _spread(quiet, median),
        "hostile": _spread(hostile, median),
        "p99 ms, quiet": _spread(quiet, _p99),
        "hostile ": _spread(hostile, _p99),
    }


def _spread(windows: list[list[float]], figure: Figure) -> Spread:
    """Return the spread of a figure over windows, in milliseconds."""
    return Spread.of([1e3 * figure(window) for window in windows])


def _ratio(ours: list[list[float]], theirs: list[list[float]], figure: Figure) -> float:
    """Median over runs, whose windows stood side by side."""
    return median(figure(mine) / figure(other) for mine, other in zip(ours, theirs, strict=True))


def _p99(waits: list[float]) -> float:
    return quantile(sorted(waits), 0.99)


if __name__ == "__main__":
    sys.exit(main())
