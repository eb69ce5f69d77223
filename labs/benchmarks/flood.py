"""A flood's effect on its neighbour, live: `python -m labs.benchmarks.flood`.

`sluice serve` with the embedded model on one core, clients on another, real HTTP. A light tenant sends short requests
on a timetable. Beside it, in turn: a tenant that keeps all slots busy in closed loops (behaved), one that sends the
same requests in an open loop at four times the server's capacity (flood), and the same flood under first come, first
served. The capacity is measured first.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh
from labs.benchmarks.load import post
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served_afresh
from labs.benchmarks.traffic import ClosedLoop, Due, Heard, Traffic

SLOTS = 16  # max_num_seqs
LIGHT, HEAVY = "light", "heavy"
LIGHT_RATE = 4.0  # requests a second
LIGHT_TOKENS = 16
HEAVY_TOKENS = (64, 320)  # answers end at different times
FLOOD = 4.0  # times capacity
BEHAVED, FAIR, FCFS = "behaved", "flood", "flood, fcfs"
SETTINGS = {"max_num_seqs": SLOTS, "max_waiting": 100_000, "max_connections": 16_000}
PROMPT = f"{MARK}: 1, 2, 3, 4, 5, 6, 7, 8,"

Figures = dict[str, dict[str, list[float]]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the three measurements")
    parser.add_argument("--events", type=Path, help="directory to keep the servers' event logs in")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 2.0
    report = Report("flood", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    figures: Figures = {name: {} for name in (BEHAVED, FAIR, FCFS)}
    for run in range(options.runs):
        _measure(options, server_core, run, figures)
    _tell(report, figures)
    return report.finish(options.results)


def _measure(options: Namespace, core: int, run: int, figures: Figures) -> None:
    """One run: capacity and both neighbours under the fair order, then the flood under the other one."""
    seconds = options.seconds
    with _server(options, core, "fair") as server:
        capacity = _capacity(server, seconds / 6)
        with Traffic(server.port) as clients:
            loops = {HEAVY: ClosedLoop(SLOTS, _heavy(server, run))}
            _note(figures[BEHAVED], clients.run(seconds, _light(server, seconds, run), loops), capacity)
        with Traffic(server.port) as clients:
            _note(figures[FAIR], clients.run(seconds, _both(server, seconds, run, capacity)), capacity)
    with _server(options, core, "fcfs") as server, Traffic(server.port) as clients:
        _note(figures[FCFS], clients.run(seconds, _both(server, seconds, run, capacity)), capacity)


@contextmanager
def _server(options: Namespace, core: int, order: str) -> Iterator[Served]:
    recorded = {"event_log": options.events / order} if options.events else {}
    with (
        TemporaryDirectory() as directory,
        served_afresh(core, (LIGHT, HEAVY), Path(directory), **SETTINGS, order=order, **recorded) as server,
    ):
        yield server


def _capacity(server: Served, seconds: float) -> float:
    """The capacity in heavy requests a second: completed under a permanent backlog, after a warm-up of the same length.

    Takes as long as the first request, if that is more than `seconds`.
    """
    with Traffic(server.port) as clients:
        heard = clients.run(2 * seconds, loops={HEAVY: ClosedLoop(2 * SLOTS, _heavy(server, 0))})
    late = [exchange for exchange in heard.of(HEAVY) if exchange.done is not None and exchange.done > seconds]
    return len(late) / (heard.seconds - seconds) or _capacity(server, 2 * seconds)


def _heavy(server: Served, seed: int) -> Iterator[bytes]:
    random = Random(seed)
    while True:
        yield next(_requests(server.keys[HEAVY], random.randint(*HEAVY_TOKENS)))


def _light(server: Served, seconds: float, seed: int) -> list[Due]:
    moments, requests = _moments(LIGHT_RATE, seconds, seed), _requests(server.keys[LIGHT], LIGHT_TOKENS)
    return [Due(at, LIGHT, request) for at, request in zip(moments, requests, strict=False)]


def _both(server: Served, seconds: float, seed: int, capacity: float) -> list[Due]:
    moments = _moments(FLOOD * capacity, seconds, seed + 1000)
    flood = [Due(at, HEAVY, request) for at, request in zip(moments, _heavy(server, seed), strict=False)]
    return sorted([*flood, *_light(server, seconds, seed)])


def _moments(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the moments of Poisson arrivals."""
    random, at = Random(seed), 0.0
    while (at := at + random.expovariate(rate)) < seconds:
        yield at


def _requests(key: str, max_tokens: int) -> Fresh:
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return Fresh(post("/v1/completions", body | {"stream": True}, key))


def _note(figures: dict[str, list[float]], heard: Heard, capacity: float) -> None:
    waits = heard.waits(LIGHT)
    row = {
        "TTFT p50 ms": quantile(waits, 0.5) * 1e3,
        "TTFT p99 ms": quantile(waits, 0.99) * 1e3,
        "light requests": len(waits),
        "heavy offered, of capacity": len(heard.of(HEAVY)) / heard.seconds / capacity,
        "heavy answered, of capacity": heard.answered(HEAVY) / heard.seconds / capacity,
        "refused": heard.refused(HEAVY) + heard.refused(LIGHT),
        "light unanswered": sum(exchange.first is None for exchange in heard.of(LIGHT)),
        "client busy": heard.busy,
        "sent late, ms at most": heard.latest * 1e3,
    }
    for name, value in row.items():
        figures.setdefault(name, []).append(value)


def _tell(report: Report, figures: Figures) -> None:
    rows: list[dict[str, object]] = [
        {"beside the light tenant": name, **{what: Spread.of(values) for what, values in own.items()}}
        for name, own in figures.items()
    ]
    report.add_table(f"light tenant's time to first token, {SLOTS} slots, median (extremes)", rows)
    report.notes = ["a light request that had no token when the clients stopped counts with its wait until then"]
    behaved, flood, fcfs = (figures[name]["TTFT p99 ms"] for name in (BEHAVED, FAIR, FCFS))
    report.at_most("p99 beside a flood, times that beside a behaved tenant", _ratio(flood, behaved), 2.0)
    report.at_most("p99 beside a flood, times that under first come, first served", _ratio(flood, fcfs), 0.1)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median ratio over runs."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
