"""The cost of the gateway over bare starlette, with an instant engine: `python -m labs.benchmarks.gateway_overhead`.

The servers run side by side on one core and take turns; the load generator has another. An answer has 32 tokens:
whole, or as 35 events (a role, the tokens, a finish and the end). Two engines answer instantly: one has the whole
answer when the request arrives, so that the gateway is all there is to measure; the other makes it in 32 steps of no
length, each planned, handed to the device thread and back, which streams are judged by.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from statistics import median

from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh, check_nothing_was_cached
from labs.benchmarks.load import Load, closed_loop, post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser

TOKENS = 32
EVENTS = 35
CONNECTIONS = 16
MESSAGES = [{"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."}]
PATH = "/v1/chat/completions"

Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    server_core, load_core = machine.two_cores()
    report = Report("gateway_overhead", options.quick)
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        bare = running.enter_context(Worker.module("labs.benchmarks.bare_server", core=server_core))
        gateway = running.enter_context(Worker.module("labs.benchmarks.gateway_server", "--instant", core=server_core))
        stepping = running.enter_context(Worker.module("labs.benchmarks.gateway_server", core=server_core))
        os.sched_setaffinity(0, {load_core})
        for _ in range(runs):
            _measure(bare, gateway, stepping, seconds, figures)
        check_nothing_was_cached(stepping.ready["port"])
    _tell(report, figures)
    return report.finish(options.results)


def _measure(bare: Worker, gateway: Worker, stepping: Worker, seconds: float, figures: Figures) -> None:
    """One run: each figure of the floor, then of the gateway over either engine."""
    whole, stream = _requests(gateway.ready["key"])
    for name, port, requests in (
        ("bare", bare.ready["port"], repeat(post("/whole", {}))),
        ("gateway", gateway.ready["port"], whole),
        ("stepping", stepping.ready["port"], whole),
    ):
        load = closed_loop(port, requests, CONNECTIONS, seconds)
        figures[f"{name} requests/s"].append(load.answers / load.seconds)
        _note_busy(load, figures)
        figures[f"{name} p50 ms"].append(_p50(closed_loop(port, requests, 1, seconds)))
    load = closed_loop(bare.ready["port"], repeat(post("/stream", {})), CONNECTIONS, seconds)
    figures["bare streams/s"].append(_streams(load))
    _note_busy(load, figures)
    load = closed_loop(gateway.ready["port"], stream, CONNECTIONS, seconds)
    figures["gateway streams/s"].append(_streams(load))
    before = stepping.ask()
    load = closed_loop(stepping.ready["port"], stream, CONNECTIONS, seconds, warm_up=0)
    after = stepping.ask()
    figures["stepping streams/s"].append(_streams(load))
    figures["loop us/token"].append((after["loop_cpu"] - before["loop_cpu"]) * 1e6 / (load.answers * TOKENS))
    _note_busy(load, figures)


def _requests(key: str) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """For whole answers, and for streams."""
    body = {"model": "embedded", "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True}
    return Fresh(post(PATH, body, key)), Fresh(post(PATH, body | {"stream": True}, key))


def _streams(load: Load) -> float:
    """Streams a second; each has all its events, however many shared a write."""
    assert load.fewest_events == EVENTS, f"{load.fewest_events} events in a stream"
    return load.answers / load.seconds


def _p50(load: Load) -> float:
    return median(load.latencies) * 1e3


def _note_busy(load: Load, figures: Figures) -> None:
    figures["generator busy"].append(load.busy)


def _tell(report: Report, figures: Figures) -> None:
    rows: list[dict[str, object]] = [
        {
            "server": name,
            f"req/s at {CONNECTIONS}": Spread.of(figures[f"{name} requests/s"]),
            f"streams/s at {CONNECTIONS}": Spread.of(figures[f"{name} streams/s"]),
            "p50 ms at 1": Spread.of(figures[f"{name} p50 ms"]),
        }
        for name in ("bare", "gateway", "stepping")
    ]
    report.add_table("32-token answers, one core, median (extremes)", rows)
    added = Spread.of(_paired(figures, "stepping p50 ms", "bare p50 ms"))
    report.notes = [
        "gateway: over an engine that has the whole answer at once; stepping: over one that makes it in 32 steps",
        f"added p50 over the stepping engine: {added} ms",
        f"requests/s over the stepping engine, share of bare: {_ratio(figures, 'stepping', 'requests/s'):.3f}",
        f"load generator: labs/benchmarks/load.py, at most {max(figures['generator busy']):.0%} of its core",
    ]
    report.at_least("requests/s, share of bare starlette", _ratio(figures, "gateway", "requests/s"), 0.15)
    streams = _ratio(figures, "stepping", "streams/s")
    report.at_least("streams/s of 35 events over the stepping engine, share of bare", streams, 0.4)
    report.at_most("added p50 at 1 connection, ms", median(_paired(figures, "gateway p50 ms", "bare p50 ms")), 1.0)
    report.at_most("loop CPU per delivered token, us", median(figures["loop us/token"]), 20.0)


def _ratio(figures: Figures, name: str, what: str) -> float:
    pairs = zip(figures[f"{name} {what}"], figures[f"bare {what}"], strict=True)
    return median(ours / floor for ours, floor in pairs)


def _paired(figures: Figures, ours: str, floor: str) -> list[float]:
    return [mine - bare for mine, bare in zip(figures[ours], figures[floor], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
