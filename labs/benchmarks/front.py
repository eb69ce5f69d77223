"""The cost of each part of the gateway, on the way of a user's request: `python -m labs.benchmarks.front`.

All servers share one core and take turns; the load generator has another. The engine takes 32 steps of no length for
an answer, each planned, handed to the device thread and back; beside it, one that has the whole answer at once, and
bare starlette on uvicorn. The first tables say what the event loop's thread does with a request, part by part, by
samples of a gateway that is told to take them (parts.py names the functions that mark each part): a regression names
its hop. The others judge the whole: requests and streams as shares of bare starlette's, beside what the libraries alone
leave of those (JSON, pydantic, jinja2, tokenizers); what a token costs while all streams run, beside a server that
writes one event a stream on the same clock and decides nothing; and what limits, the event log and tracing add.
"""

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh, check_nothing_was_cached
from labs.benchmarks.load import Clients, closed_loop, post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser

TOKENS = 32
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."}]
BODY = {"model": "embedded", "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True}
CONNECTIONS = (16, 64)
STEADY = {64: 10, 256: 20}  # streams that run all the time, and how many milliseconds a step of theirs takes
LIMITS = """\
defaults:
  limits: {requests: 600k/min, tokens: {rate: 1B/min, burst: 1B}, output_tokens: 1B/min, concurrent_requests: 512}
"""
MODES = ("limits", "event log", "1 % traced", "all traced")

Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    report = Report("front", options.quick)
    _parts(report, server_core, seconds * runs)
    _ratios(report, server_core, runs, seconds)
    _added(report, server_core, runs, seconds)
    _tokens(report, server_core, runs, seconds)
    return report.finish(options.results)


def _requests(key: str, stream: bool, tokens: int = TOKENS) -> Iterator[bytes]:
    return Fresh(post(PATH, BODY | {"max_tokens": tokens, "stream": stream}, key))


# The parts ------------------------------------------------------------------------------------------------------------


def _parts(report: Report, core: int, seconds: float) -> None:
    with Worker.module("labs.benchmarks.gateway_server", "--sample", core=core) as server:
        for kind in ("whole", "stream"):
            columns = {n: _cost_by_part(server, kind == "stream", n, seconds) for n in CONNECTIONS}
            parts = sorted(columns[CONNECTIONS[0]], key=lambda part: -columns[CONNECTIONS[0]][part])
            rows: list[dict[str, object]] = [
                {"part": part} | {f"us at {n}": columns[n].get(part, 0.0) for n in CONNECTIONS} for part in parts
            ]
            report.add_table(f"loop CPU of a request by part, {kind} answers of {TOKENS} tokens", rows)


def _cost_by_part(server: Worker, stream: bool, connections: int, seconds: float) -> dict[str, float]:
    """Microseconds of a request; what is measured of the samples' own cost counts as the loop's."""
    asked, answers = _loaded(server, _requests(server.ready["key"], stream), connections, seconds)
    samples = Counter(asked["samples"])
    cost = asked["loop_cpu"] * 1e6 / answers
    shares = {part: cost * count / samples.total() for part, count in samples.items()}
    return {"all": cost} | shares


def _loaded(server: Worker, requests: Iterator[bytes], connections: int, seconds: float) -> tuple[dict[str, Any], int]:
    """Put a load on it; returns the increase of its figures, and the number of answers."""
    closed_loop(server.ready["port"], requests, connections, seconds / 6)
    before = server.ask()
    load = closed_loop(server.ready["port"], requests, connections, seconds, warm_up=0)
    check_nothing_was_cached(server.ready["port"])
    return _since(before, server.ask()), load.answers


def _since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    risen = {name: after[name] - before[name] for name in after if name != "samples"}
    return risen | {"samples": Counter(after.get("samples", {})) - Counter(before.get("samples", {}))}


# Shares of bare starlette ---------------------------------------------------------------------------------------------


def _ratios(report: Report, core: int, runs: int, seconds: float) -> None:
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        bare = running.enter_context(Worker.module("labs.benchmarks.bare_server", core=core))
        instant = running.enter_context(Worker.module("labs.benchmarks.gateway_server", "--instant", core=core))
        stepping = running.enter_context(Worker.module("labs.benchmarks.gateway_server", core=core))
        key = stepping.ready["key"]
        for _ in range(runs):
            for n in CONNECTIONS:
                for name, server, requests in (
                    ("bare whole", bare, repeat(post("/whole", {}))),
                    ("libraries whole", bare, Fresh(post("/libraries", BODY))),
                    ("instant whole", instant, _requests(key, stream=False)),
                    ("whole", stepping, _requests(key, stream=False)),
                    ("bare stream", bare, repeat(post("/stream", {}))),
                    ("stream", stepping, _requests(key, stream=True)),
                ):
                    load = closed_loop(server.ready["port"], requests, n, seconds)
                    figures[f"{name} {n}"].append(load.answers / load.seconds)
                    figures["generator"].append(load.busy)
            bare_ms, own_ms = (
                1e3 * median(closed_loop(server.ready["port"], requests, 1, seconds).latencies)
                for server, requests in ((bare, repeat(post("/whole", {}))), (instant, _requests(key, stream=False)))
            )
            figures["added p50 ms"].append(own_ms - bare_ms)
        check_nothing_was_cached(stepping.ready["port"])
    names = ("bare whole", "libraries whole", "instant whole", "whole", "bare stream", "stream")
    rows: list[dict[str, object]] = [
        {"server": name} | {f"answers/s at {n}": Spread.of(figures[f"{name} {n}"]) for n in CONNECTIONS}
        for name in names
    ]
    report.add_table(f"answers of {TOKENS} tokens a second, one core, median (extremes)", rows)
    report.notes.append(f"load generator: at most {max(figures['generator']):.0%} of its core")
    for n in CONNECTIONS:
        libraries = _share(figures, "libraries whole", "bare whole", n)
        report.notes.append(f"the libraries alone, without steps, at {n}: {libraries:.3f} of bare")
        for name, floor, least in (("whole", "bare whole", 0.12), ("instant whole", "bare whole", 0.25)):
            report.at_least(f"{name} answers/s at {n}, share of bare", _share(figures, name, floor, n), least)
        report.at_least(f"streams/s at {n}, share of bare", _share(figures, "stream", "bare stream", n), 0.65)
    added = "p50 at 1 connection that the gateway adds over an instant engine, ms"
    report.at_most(added, median(figures["added p50 ms"]), 1.0)


def _share(figures: Figures, name: str, floor: str, n: int) -> float:
    pairs = zip(figures[f"{name} {n}"], figures[f"{floor} {n}"], strict=True)
    return median(ours / theirs for ours, theirs in pairs)


# What else is asked of a gateway --------------------------------------------------------------------------------------


def _added(report: Report, core: int, runs: int, seconds: float) -> None:
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        servers = running.enter_context(_modes(core))
        for run in range(runs):
            names = list(servers)
            for name in names[run % len(names) :] + names[: run % len(names)]:
                server = servers[name]
                requests = _requests(server.ready["key"], stream=False)
                risen, answers = _loaded(server, requests, CONNECTIONS[0], seconds)
                figures[f"{name} loop"].append(risen["loop_cpu"] * 1e6 / answers)
                figures[f"{name} process"].append(risen["process_cpu"] * 1e6 / answers)
    rows: list[dict[str, object]] = [
        {"with": name} | {f"us of the {who}": Spread.of(figures[f"{name} {who}"]) for who in ("loop", "process")}
        for name in ("nothing", *MODES)
    ]
    report.add_table(f"CPU of a whole answer at {CONNECTIONS[0]} connections, median (extremes)", rows)
    limits = [ours - plain for ours, plain in zip(figures["limits loop"], figures["nothing loop"], strict=True)]
    report.at_most("four limits add to a request's loop CPU, us", median(limits), 70.0)
    report.at_most("the event log adds, share of loop CPU", _more(figures, "event log loop", "nothing loop"), 0.05)
    for name, most in (("1 % traced", 0.02), ("all traced", 0.30)):
        more = _more(figures, f"{name} process", "nothing process")
        report.at_most(f"tracing, {name}, adds, share of the process's CPU", more, most)


def _more(figures: Figures, name: str, plain: str) -> float:
    return median(ours / theirs for ours, theirs in zip(figures[name], figures[plain], strict=True)) - 1


@contextmanager
def _modes(core: int) -> Iterator[dict[str, Worker]]:
    with TemporaryDirectory() as folder, ExitStack() as running:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(LIMITS)
        sink = running.enter_context(Worker.module("labs.benchmarks.span_sink", core=machine.two_cores()[1]))
        traced = [f"otlp_endpoint=http://127.0.0.1:{sink.ready['port']}", "otlp_protocol=http"]
        traced += ["trace_max_per_second=100000", "trace_slow_seconds=60"]
        settings = {
            "nothing": [],
            "limits": [f"policy={policy}"],
            "event log": [f"event_log={folder}/events.jsonl"],
            "1 % traced": [*traced, "trace_sample_ratio=0.01"],
            "all traced": [*traced, "trace_sample_ratio=1"],
        }
        yield {
            name: running.enter_context(
                Worker.module("labs.benchmarks.gateway_server", *(f"--set={one}" for one in chosen), core=core)
            )
            for name, chosen in settings.items()
        }


# What a token costs ---------------------------------------------------------------------------------------------------


def _tokens(report: Report, core: int, runs: int, seconds: float) -> None:
    figures: dict[tuple[str, int], Figures] = defaultdict(lambda: defaultdict(list))
    for _ in range(runs):
        for n, step_ms in STEADY.items():
            for name, module in (
                ("bare", "labs.benchmarks.bare_server"),
                ("gateway", "labs.benchmarks.gateway_server"),
            ):
                with Worker.module(module, "--step-ms", str(step_ms), core=core) as server:
                    _steady(server, n, step_ms, seconds, figures[name, n])
    rows: list[dict[str, object]] = [
        {"server": name, "streams": n} | {what: Spread.of(values) for what, values in own.items()}
        for (name, n), own in figures.items()
    ]
    report.add_table("tokens of streams that all run, one event each, median (extremes)", rows)
    for n in STEADY:
        ours, floor = (figures[name, n]["loop us/token"] for name in ("gateway", "bare"))
        share = median(mine / theirs for mine, theirs in zip(ours, floor, strict=True))
        report.at_most(f"loop CPU a token at {n} streams, times bare", share, 1.1)


def _steady(server: Worker, streams: int, step_ms: int, seconds: float, figures: Figures) -> None:
    """A window in which all streams run: none begins in it and none ends."""
    tokens = min(2000, int((seconds + 5) * 1000 / step_ms))
    requests = _requests(server.ready.get("key", ""), stream=True, tokens=tokens)
    with Clients(server.ready["port"], streams) as clients:
        clients.begin_streams(requests)
        before, events = server.ask(), clients.num_events
        clients.stream_for(seconds)
        risen, events = _since(before, server.ask()), clients.num_events - events
    figures["events/s"].append(events / risen["at"])
    figures["loop us/token"].append(risen["loop_cpu"] * 1e6 / events)
    figures["rows a step"].append(risen["rows"] / max(1, risen["steps"]))
    figures["events a write"].append(events / max(1, risen["writes"] - risen["steps"]))


if __name__ == "__main__":
    sys.exit(main())
