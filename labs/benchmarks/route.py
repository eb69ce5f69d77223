"""The cost of a router: `sluice route` before a server with fixed answers, beside starlette streaming through httpx.

Both proxies run on one core, and on the other the server and the load. A stream has 35 events; the router
authenticates, digests the prompt and picks among two addresses of the server, which tells that it is idle.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from backend.bound_process import bound
from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh
from labs.benchmarks.load import Load, closed_loop, post
from labs.benchmarks.machine import on_core
from labs.benchmarks.processes import ROOT, Worker, WorkerFailed
from labs.benchmarks.report import Report, Spread, scenario_parser

KEY, ADMIN_KEY = "sk-benchmark", "correct-horse-battery-staple"
EVENTS = 35
CONNECTIONS = 16
NUM_OPEN_STREAMS = 1000
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence. " * 40},
    {"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."},
]
PATH = "/v1/chat/completions"

Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds, many = (1, 0.3, 50) if options.quick else (options.runs, options.seconds, NUM_OPEN_STREAMS)
    proxy_core, load_core = machine.two_cores()
    report = Report("route", options.quick)
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        server = running.enter_context(Worker.module("labs.benchmarks.bare_server", core=load_core))
        origins = [f"http://127.0.0.1:{server.ready['port']}", f"http://localhost:{server.ready['port']}"]
        floor = running.enter_context(Worker.module("labs.benchmarks.bare_proxy", origins[0], core=proxy_core))
        router = running.enter_context(_router(origins, proxy_core))
        os.sched_setaffinity(0, {load_core})
        ports = {"direct": server.ready["port"], "httpx": floor.ready["port"], "router": router}
        for _ in range(runs):
            _measure(ports, seconds, figures)
        _open_many(router, many, seconds, report)
    _tell(report, figures)
    return report.finish(options.results)


def _measure(ports: dict[str, int], seconds: float, figures: Figures) -> None:
    body = {"model": "embedded", "messages": MESSAGES}
    whole, stream = Fresh(post(PATH, body, KEY)), Fresh(post(PATH, body | {"stream": True}, KEY))
    for name, port in ports.items():
        figures[f"{name} p50 ms"].append(median(closed_loop(port, whole, 1, seconds).latencies) * 1e3)
        load = closed_loop(port, stream, CONNECTIONS, seconds)
        figures[f"{name} streams/s"].append(_streams(load))


def _streams(load: Load) -> float:
    assert load.fewest_events == EVENTS, f"{load.fewest_events} events in a stream"
    return load.answers / load.seconds


def _open_many(port: int, count: int, seconds: float, report: Report) -> None:
    """Keep `count` streams open at once, each of which has to have all its events."""
    body = {"model": "embedded", "messages": MESSAGES, "stream": True}
    load = closed_loop(port, Fresh(post(PATH, body, KEY)), count, max(seconds, 2.0))
    report.notes.append(f"{count} streams at a time through the router: {_streams(load):.0f} streams/s, all complete")


@contextmanager
def _router(origins: list[str], core: int) -> Iterator[int]:
    """Run one on a core; yield its port once it has heard from the replicas."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "replicas.yaml"
        rows = "".join(f"- {{url: '{origin}', admin: '{origin}'}}\n" for origin in origins)
        file.write_text(f"replicas:\n{rows}")
        flags = ["--replicas", str(file), "--port", "0", "--admin-port", "off", "--state-dir", folder]
        environment = {**os.environ, "SLUICE_DEMO_KEY": KEY, "SLUICE_ADMIN_KEY": ADMIN_KEY}
        with on_core(core):
            process = subprocess.Popen(
                **bound([sys.executable, "-m", "sluice", "route", *flags, "--log-level", "warning"]),
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline())
            if found is None:
                raise WorkerFailed(f"sluice route ended with status {process.wait()}")
            yield int(found[1])
        finally:
            process.terminate()
            process.communicate()


def _tell(report: Report, figures: Figures) -> None:
    rows: list[dict[str, object]] = [
        {
            "through": name,
            f"streams/s at {CONNECTIONS}": Spread.of(figures[f"{name} streams/s"]),
            "p50 ms at 1": Spread.of(figures[f"{name} p50 ms"]),
        }
        for name in ("direct", "httpx", "router")
    ]
    report.add_table("35 events a stream, one core, median (extremes)", rows)
    pairs = zip(figures["router streams/s"], figures["httpx streams/s"], strict=True)
    report.at_least("streams/s, share of starlette and httpx", median(ours / floor for ours, floor in pairs), 0.5)
    added = zip(figures["router p50 ms"], figures["direct p50 ms"], strict=True)
    report.at_most("added p50 at 1 connection, ms", median(ours - direct for ours, direct in added), 1.5)


if __name__ == "__main__":
    sys.exit(main())
