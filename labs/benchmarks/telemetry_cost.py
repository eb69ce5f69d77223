"""The cost of tracing: `python -m labs.benchmarks.telemetry_cost`.

Three gateways run side by side on one core and take turns: one without a collector, one that traces nothing of what it
is asked, one that traces everything, each over an engine that answers at once. Each figure is a difference of the CPU
time of the loop's thread for a request, paired within a run. What is kept of every request, traced or not, is timed by
itself and added. `front` judges the share of the process's CPU that tracing adds.
"""

import os
import sys
from collections import defaultdict
from contextlib import ExitStack
from statistics import median
from timeit import repeat

from admission.outcome import Outcome
from gateway.http.responses import ResponseWriter
from gateway.telemetry.request_record import Telemetry
from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh, check_nothing_was_cached
from labs.benchmarks.load import closed_loop, post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser

TOKENS = 8
CONNECTIONS = 16
PATH = "/v1/chat/completions"
BODY = {
    "model": "embedded",
    "messages": [{"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
}
MODES = {"off": None, "unsampled": "0", "sampled": "1"}  # share of requests that are traced; None: no collector
STORIES = 20_000

Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    server_core, load_core = machine.two_cores()
    report = Report("telemetry_cost", options.quick)
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        sink = running.enter_context(Worker.module("labs.benchmarks.span_sink", core=load_core))
        gateways = {
            name: running.enter_context(_gateway(sink.ready["port"], ratio, server_core))
            for name, ratio in MODES.items()
        }
        os.sched_setaffinity(0, {load_core})
        for run in range(runs):
            for name in _turns(run, list(MODES)):
                measure(name, gateways[name], seconds, figures)
            os.sched_setaffinity(0, {server_core})
            figures["story us"].append(_story_us())
            os.sched_setaffinity(0, {load_core})
    _tell(report, figures)
    return report.finish(options.results)


def _gateway(sink_port: int, ratio: str | None, core: int) -> Worker:
    settings = {"otlp_endpoint": f"http://127.0.0.1:{sink_port}", "otlp_protocol": "http", "trace_sample_ratio": ratio}
    settings |= {"trace_max_per_second": "100000", "trace_slow_seconds": "60"}
    flags = [] if ratio is None else [f"--set={name}={value}" for name, value in settings.items()]
    return Worker.module("labs.benchmarks.gateway_server", "--instant", *flags, core=core)


def _turns(run: int, names: list[str]) -> list[str]:
    """Rotate the order each time, so that no variant always follows the exporter's work."""
    return names[run % 3 :] + names[: run % 3]


def measure(name: str, gateway: Worker, seconds: float, figures: Figures, tokens: int = TOKENS) -> None:
    """Add the CPU time of a request at a gateway, of its loop and of its process, and its requests per second."""
    requests = Fresh(post(PATH, BODY | {"max_tokens": tokens}, gateway.ready["key"]))
    closed_loop(gateway.ready["port"], requests, CONNECTIONS, seconds / 6)
    before = gateway.ask()
    load = closed_loop(gateway.ready["port"], requests, CONNECTIONS, seconds, warm_up=0)
    after = gateway.ask()
    figures[f"{name} loop us"].append((after["loop_cpu"] - before["loop_cpu"]) * 1e6 / load.answers)
    figures[f"{name} process us"].append((after["process_cpu"] - before["process_cpu"]) * 1e6 / load.answers)
    figures[f"{name} requests/s"].append(load.answers / load.seconds)
    check_nothing_was_cached(gateway.ready["port"])


def _story_us() -> float:
    """The microseconds to begin and to end a request's record, without listeners."""
    telemetry = Telemetry(lambda: 0.0)
    scope = {"method": "POST", "path": PATH, "headers": [(b"x-request-id", b"req_1"), (b"host", b"localhost")]}
    response = ResponseWriter(scope, _send, telemetry.clock)

    def one() -> None:
        telemetry.ended(telemetry.begin(scope, response), Outcome.COMPLETED)

    return min(repeat(one, number=STORIES, repeat=3)) / STORIES * 1e6


async def _send(message: object) -> None:
    """Send nothing: the cost of sending is not measured."""


def _tell(report: Report, figures: Figures) -> None:
    rows: list[dict[str, object]] = [
        {
            "tracing": name,
            "loop us/request": Spread.of(figures[f"{name} loop us"]),
            "process us/request": Spread.of(figures[f"{name} process us"]),
            f"req/s at {CONNECTIONS}": Spread.of(figures[f"{name} requests/s"]),
        }
        for name in MODES
    ]
    report.add_table(f"whole answers of {TOKENS} tokens, one core, median (extremes)", rows)
    record = median(figures["story us"])
    unsampled, sampled = (_added(figures, name) for name in ("unsampled", "sampled"))
    report.notes = [
        f"the story of a request, traced or not: {Spread.of(figures['story us'])} us",
        f"added where nothing is traced: {Spread.of(unsampled)} us; where everything is: {Spread.of(sampled)} us",
        "the process's time has the exporter's thread in it, which encodes and sends",
    ]
    report.at_most("loop CPU of a request that is not traced, story and decision, us", record + median(unsampled), 20.0)
    report.at_most("loop CPU of a request that is traced, us", record + median(sampled), 400.0)


def _added(figures: Figures, name: str) -> list[float]:
    return [ours - off for ours, off in zip(figures[f"{name} loop us"], figures["off loop us"], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
