"""The device's waits for the host between two steps, under 256 SSE streams: `python -m labs.benchmarks.device_idle`.

The gateway runs on one core over a simulated device whose steps take 5 ms; the clients are in this process, on another
core. Each depth is measured by itself: two steps in flight, which is how the engine runs, and one, which shows why.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh, check_nothing_was_cached
from labs.benchmarks.load import Clients, post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser

STREAMS = 256
STEP_MS = 5.0
MAX_IDLE = 0.02
PATH = "/v1/chat/completions"

Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured in each run, with every stream running")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    report = Report("device_idle", options.quick)
    figures = {depth: defaultdict[str, list[float]](list) for depth in (2, 1)}
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    for _ in range(runs):
        for depth, own in figures.items():
            arguments_of_server = ("--step-ms", str(STEP_MS), "--steps-in-flight", str(depth))
            with Worker.module("labs.benchmarks.gateway_server", *arguments_of_server, core=server_core) as server:
                _measure(server, seconds, own)
    _tell(report, figures)
    return report.finish(options.results)


def _measure(server: Worker, seconds: float, figures: Figures) -> None:
    """A window in which all streams run: none begins in it and none ends."""
    steps = int((seconds + 10) * 1000 / STEP_MS)
    messages = [{"role": "user", "content": f"{MARK}: count from 3 to 12."}]
    body = {"model": "embedded", "messages": messages, "max_tokens": min(steps, 2000), "ignore_eos": True}
    requests = Fresh(post(PATH, body | {"stream": True}, server.ready["key"]))
    with Clients(server.ready["port"], STREAMS) as clients:
        clients.begin_streams(requests)
        before, gaps, cpu = server.ask(), clients.num_events, time.process_time()
        clients.stream_for(seconds)
        after = server.ask()
        delivered = clients.num_events - gaps
    check_nothing_was_cached(server.ready["port"])
    elapsed, busy = after["at"] - before["at"], after["busy"] - before["busy"]
    figures["idle"].append(1 - busy / elapsed)
    figures["tokens/s"].append(delivered / elapsed)
    figures["loop CPU"].append((after["loop_cpu"] - before["loop_cpu"]) / elapsed)
    figures["loop us/token"].append((after["loop_cpu"] - before["loop_cpu"]) * 1e6 / delivered)
    figures["clients' CPU"].append((time.process_time() - cpu) / elapsed)


def _tell(report: Report, figures: Mapping[int, Figures]) -> None:
    rows: list[dict[str, object]] = [
        {"steps in flight": depth} | {name: Spread.of(values) for name, values in own.items()}
        for depth, own in figures.items()
    ]
    report.add_table(f"{STREAMS} streams, {STEP_MS:g} ms a step, median (extremes)", rows)
    report.notes = ["idle: the share of the window in which the device had no step; events are tokens, one each"]
    report.at_most("device idle with two steps in flight", median(figures[2]["idle"]), MAX_IDLE)
    report.at_most("loop CPU per delivered token, us", median(figures[2]["loop us/token"]), 20.0)


if __name__ == "__main__":
    sys.exit(main())
