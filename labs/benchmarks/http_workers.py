"""The worth of HTTP workers, and the work that they leave to the engine's loop: `python -m
labs.benchmarks.http_workers`.

The gateway runs over a simulated device, without workers and with some. What a token and a request cost is processor
time of the engine's event loop, which has a core of its own, and of its workers, which share the other with the load
generator; the event log is on. Streams that all run show what a token costs at the pace of a device, and answers of 32
and of 256 tokens what a request does; at 16 connections steps have no length, and every cache is warm.

Then both cores are everybody's: how long a device that makes 25,000 tokens a second waits for its host, and how fast
answers come. The load generator takes its share of these cores too, which is told.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from tempfile import TemporaryDirectory

from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh, check_nothing_was_cached
from labs.benchmarks.load import Clients, closed_loop, post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser

WORKERS = 2
STEADY = {16: 10, 256: 20, 1000: 60}  # streams that run all the time, and how many milliseconds a step of theirs takes
LOOP_US_A_TOKEN = {16: 8.0, 256: 3.0, 1000: 3.0}
SHORT_ANSWER_TOKENS, LONG_ANSWER_TOKENS = 32, 256  # tokens of the answers from which the cost of a request is told
CLOSED = {16: 0.0, 64: 5.0}  # connections with a request each, and how many milliseconds a step of theirs takes
CONNECTIONS = 64
DEVICE_STREAMS, DEVICE_US = 1000, 40.0  # of device time a token
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."}]
BODY = {"model": "embedded", "messages": MESSAGES, "ignore_eos": True}

Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    report = Report("http_workers", options.quick)
    _tokens(report, runs, seconds)
    _requests(report, runs, seconds)
    _device(report, runs, seconds)
    _rates(report, runs, seconds)
    return report.finish(options.results)


def _fresh(server: Worker, stream: bool, tokens: int) -> Iterator[bytes]:
    return Fresh(post(PATH, BODY | {"max_tokens": tokens, "stream": stream}, server.ready["key"]))


# The processes --------------------------------------------------------------------------------------------------------


@contextmanager
def _gateway(workers: int, *arguments: str, own_core: bool = False) -> Iterator[Worker]:
    """With a core of its own, the engine's process is alone on the first, and all others are on the last."""
    engine_core, other_core = machine.two_cores()
    flags = (f"--set=http_workers={workers}", "--set=max_num_seqs=1024", "--set=log_level=warning", *arguments)
    with TemporaryDirectory() as folder, machine.on_cores(os.sched_getaffinity(0)):
        log = f"--set=event_log={folder}/events.jsonl"
        command = [sys.executable, "-m", "labs.benchmarks.gateway_server", log, *flags]
        with Worker(command, engine_core if own_core else None) as server:
            if own_core:
                for pid in (*_workers(server), 0):
                    os.sched_setaffinity(pid, {other_core})
            yield server
            check_nothing_was_cached(server.ready["port"])


def _workers(server: Worker) -> list[int]:
    return machine.children(server.pid, "gateway.workers.worker_process")


class _Window:
    """The processor time of everybody, and what the device did, in a stretch of time."""

    def __init__(self, server: Worker) -> None:
        self._server = server
        self._before = self._now()

    def end(self) -> dict[str, float]:
        """The increase of each figure."""
        return {name: value - self._before[name] for name, value in self._now().items()}

    def _now(self) -> dict[str, float]:
        told = self._server.ask()
        names = ("at", "loop_cpu", "process_cpu", "idle", "steps", "rows")
        workers = sum(machine.cpu_seconds(pid) for pid in _workers(self._server))
        return {name: told[name] for name in names} | {"workers": workers, "generator": time.process_time()}


def _steady(server: Worker, streams: int, step_ms: float, seconds: float) -> tuple[dict[str, float], int]:
    """A window in which all streams run, none begins and none ends; returns its figures and the tokens that came."""
    requests = _fresh(server, stream=True, tokens=min(2000, int((seconds + 10) * 1000 / step_ms)))
    with Clients(server.ready["port"], streams) as clients:
        clients.begin_streams(requests)
        window, events = _Window(server), clients.num_events
        clients.stream_for(seconds)
        return window.end(), clients.num_events - events


# What a token and a request cost --------------------------------------------------------------------------------------


def _tokens(report: Report, runs: int, seconds: float) -> None:
    figures: dict[tuple[int, int], Figures] = defaultdict(lambda: defaultdict(list))
    for _ in range(runs):
        for streams, step_ms in STEADY.items():
            for workers in (0, WORKERS):
                with _gateway(workers, f"--step-ms={step_ms}", own_core=True) as server:
                    risen, tokens = _steady(server, streams, step_ms, seconds)
                own = figures[workers, streams]
                own["loop us"].append(risen["loop_cpu"] * 1e6 / tokens)
                own["engine's process us"].append(risen["process_cpu"] * 1e6 / tokens)
                own["workers us"].append(risen["workers"] * 1e6 / tokens)
                own["generator us"].append(risen["generator"] * 1e6 / tokens)
                own["rows a step"].append(risen["rows"] / max(1, risen["steps"]))
    rows: list[dict[str, object]] = [
        {"workers": workers, "streams": streams} | {what: Spread.of(values) for what, values in own.items()}
        for (workers, streams), own in figures.items()
    ]
    report.add_table("CPU of a token of streams that all run, one event each, event log on, median (extremes)", rows)
    for streams, most in LOOP_US_A_TOKEN.items():
        what = f"loop CPU a token at {streams} streams with workers, us"
        report.at_most(what, median(figures[WORKERS, streams]["loop us"]), most)
    for streams in STEADY:
        what = f"a worker's CPU a token at {streams} streams, us"
        report.at_most(what, median(figures[WORKERS, streams]["workers us"]), 14.0)


def _requests(report: Report, runs: int, seconds: float) -> None:
    """Two loads of the same connections, whose answers are short and long, tell a request's cost from a token's."""
    figures: dict[tuple[int, int], Figures] = defaultdict(lambda: defaultdict(list))
    for _ in range(runs):
        for connections, step_ms in CLOSED.items():
            for workers in (0, WORKERS):
                with _gateway(workers, f"--step-ms={step_ms}", own_core=True) as server:
                    short, long = (
                        _loaded(server, connections, tokens, seconds)
                        for tokens in (SHORT_ANSWER_TOKENS, LONG_ANSWER_TOKENS)
                    )
                own = figures[workers, connections]
                for name, what in (("loop_cpu", "loop"), ("workers", "workers"), ("generator", "generator")):
                    request, token = _shares(short, long, name)
                    own[f"{what}: us a request"].append(request * 1e6)
                    own[f"{what}: a token"].append(token * 1e6)
    rows: list[dict[str, object]] = [
        {"workers": workers, "connections": connections, "step ms": CLOSED[connections]}
        | {what: Spread.of(values) for what, values in own.items()}
        for (workers, connections), own in figures.items()
    ]
    report.add_table(
        f"CPU of streams of {SHORT_ANSWER_TOKENS} and of {LONG_ANSWER_TOKENS} tokens, event log on, median (extremes)",
        rows,
    )
    few, many = (figures[WORKERS, connections] for connections in CLOSED)
    report.at_most("loop CPU a token at 16 connections by the slope, us", median(few["loop: a token"]), 8.0)
    report.at_most("loop CPU a request with workers, us", median(many["loop: us a request"]), 120.0)


def _loaded(server: Worker, connections: int, tokens: int, seconds: float) -> dict[str, float]:
    """The cost of a window in which each answer is followed by a request."""
    requests = _fresh(server, stream=True, tokens=tokens)
    with Clients(server.ready["port"], connections) as clients:
        clients.send(requests)
        clients.run(requests, seconds / 2)
        window = _Window(server)
        answers = clients.run(requests, seconds).answers
        return window.end() | {"answers": max(1, answers)}


def _shares(short: dict[str, float], long: dict[str, float], name: str) -> tuple[float, float]:
    """Returns the seconds of a request and of a token that explain what both windows took."""
    token = short["answers"] * long[name] - long["answers"] * short[name]
    token /= short["answers"] * long["rows"] - long["answers"] * short["rows"]
    return (short[name] - short["rows"] * token) / short["answers"], token


# Both cores are everybody's -------------------------------------------------------------------------------------------


def _device(report: Report, runs: int, seconds: float) -> None:
    figures: Figures = defaultdict(list)
    for _ in range(runs):
        with _gateway(WORKERS, f"--token-us={DEVICE_US}") as server:
            risen, tokens = _steady(server, DEVICE_STREAMS, DEVICE_STREAMS * DEVICE_US / 1000, seconds)
        took = risen["at"]
        used = {"engine's process": risen["process_cpu"], "workers": risen["workers"], "generator": risen["generator"]}
        figures["idle"].append(risen["idle"] / took)
        figures["tokens/s"].append(tokens / took)
        for name, cpu in used.items():
            figures[f"{name}, cores"].append(cpu / took)
        figures["two cores allow, tokens/s"].append(2 * tokens / sum(used.values()))
        figures["without the generator"].append(2 * tokens / (used["engine's process"] + used["workers"]))
    row: dict[str, object] = {"workers": WORKERS} | {what: Spread.of(values) for what, values in figures.items()}
    title = f"{DEVICE_STREAMS} streams, {DEVICE_US:g} us of device a token, event log on, median (extremes)"
    report.add_table(title, [row])
    report.notes.append("what two cores allow: tokens in the processor time that was used for those of the window")
    report.at_most("device idle, share of time", median(figures["idle"]), 0.02)


def _rates(report: Report, runs: int, seconds: float) -> None:
    figures: dict[int, Figures] = {workers: defaultdict(list) for workers in range(WORKERS + 1)}
    with ExitStack() as running:
        servers = {workers: running.enter_context(_gateway(workers)) for workers in figures}
        for _ in range(runs):
            for workers, server in servers.items():
                own, port = figures[workers], server.ready["port"]
                alone = closed_loop(port, _fresh(server, stream=False, tokens=SHORT_ANSWER_TOKENS), 1, seconds)
                own["p50 ms at 1"].append(quantile(sorted(alone.latencies), 0.5) * 1000)
                for name, stream in (("requests/s", False), ("streams/s", True)):
                    load = closed_loop(port, _fresh(server, stream, SHORT_ANSWER_TOKENS), CONNECTIONS, seconds)
                    own[f"{name} at {CONNECTIONS}"].append(load.answers / load.seconds)
                    own[f"generator, {name}"].append(load.busy)
    rows: list[dict[str, object]] = [
        {"workers": workers} | {what: Spread.of(values) for what, values in own.items()}
        for workers, own in figures.items()
    ]
    report.add_table(f"answers through {SHORT_ANSWER_TOKENS} steps of no length on two cores, median (extremes)", rows)
    pairs = zip(figures[WORKERS]["p50 ms at 1"], figures[0]["p50 ms at 1"], strict=True)
    report.at_most("p50 at 1 connection, workers add, ms", median(ours - theirs for ours, theirs in pairs), 0.2)


if __name__ == "__main__":
    sys.exit(main())
