"""The whole gateway, limits on, beside LiteLLM's proxy with its limits in Redis: `python -m
labs.benchmarks.gateway_peers`.

Each proxy is alone on one core; the load generator, one Redis for all and LiteLLM's backend have the other. They take
turns run by run. Answers have 32 tokens, whole or as 35 events. LiteLLM's backend is a bare server that has the whole
answer at once, on the other core. Ours is judged by the way of a user's request: over an engine that makes each answer
in 32 steps of no length, each planned, handed to the device thread and back, which is work that LiteLLM leaves to its
backend. Beside it stands the gateway over an engine that has the answer at once as well. Each counts requests and
tokens of one key in Redis, for every request, against limits that are never reached: the cost of enforcing them is
compared. A quick run leaves LiteLLM out.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from labs.benchmarks import litellm_environment, litellm_proxy, machine
from labs.benchmarks.fresh import MARK, Fresh, check_nothing_was_cached
from labs.benchmarks.load import closed_loop, post
from labs.benchmarks.processes import Worker, free_port
from labs.benchmarks.redis_server import RedisServer
from labs.benchmarks.report import Report, Spread, scenario_parser

CONNECTIONS = 16
EVENTS = 35
PATH = "/v1/chat/completions"
BODY: dict[str, object] = {
    "model": "embedded",
    "messages": [{"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."}],
    "max_tokens": 32,
}
OURS, INSTANT, LITELLM = "sluice", "sluice, instant engine", "litellm"
POLICY = """
classes:
  standard: {service_tiers: [fast, priority, scale, flex]}
defaults:
  highest_class: standard
  default_class: standard
  limits: {requests: 100M/min, tokens: 1B/min}
tenants: {}
"""
WARM_UP = 3.0  # seconds of each kind of request, once

Figures = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Server:
    """A proxy under test, and its requests."""

    port: int
    key: str
    extra: dict[str, object]  # in each body

    @property
    def whole(self) -> Iterator[bytes]:
        return Fresh(post(PATH, BODY | self.extra, self.key))

    @property
    def stream(self) -> Iterator[bytes]:
        return Fresh(post(PATH, BODY | self.extra | {"stream": True}, self.key))

    def is_limited(self) -> bool:
        """True if its answers report the rest of a limit."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        head, _, body = next(self.whole).partition(b"\r\n\r\n")
        try:
            connection.request("POST", PATH, body, dict(line.split(": ") for line in head.decode().split("\r\n")[1:]))
            return any(name.lower().startswith("x-ratelimit-") for name, _ in connection.getresponse().getheaders())
        finally:
            connection.close()


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds, warm_up = (1, 0.3, 0.3) if options.quick else (options.runs, options.seconds, WARM_UP)
    report = Report("gateway_peers", options.quick)
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        servers = _start(running, with_litellm=not options.quick)
        for server in servers.values():
            for requests in (server.whole, server.stream):
                closed_loop(server.port, requests, CONNECTIONS, warm_up)
        for run in range(runs):
            print(f"run {run + 1} of {runs}", file=sys.stderr)
            _measure(servers, seconds, figures)
        limited = {name: server.is_limited() for name, server in servers.items()}
        check_nothing_was_cached(servers[OURS].port)
    _tell(report, figures, limited)
    return report.finish(options.results)


def _start(running: ExitStack, with_litellm: bool) -> dict[str, Server]:
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    directory, redis_port = Path(running.enter_context(TemporaryDirectory())), free_port()
    running.enter_context(RedisServer(directory, redis_port))
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    limits = {"SLUICE_POLICY": str(policy), "SLUICE_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0"}
    servers = {}
    for name, flags in ((OURS, ()), (INSTANT, ("--instant",))):
        command = [sys.executable, "-m", "labs.benchmarks.gateway_server", *flags]
        ready = running.enter_context(Worker(command, server_core, limits)).ready
        servers[name] = Server(ready["port"], ready["key"], {"ignore_eos": True})
    if with_litellm:
        backend = running.enter_context(Worker.module("labs.benchmarks.bare_server", core=load_core)).ready["port"]
        port = running.enter_context(litellm_proxy.litellm_proxy(server_core, backend, redis_port)).port
        servers[LITELLM] = Server(port, litellm_proxy.KEY, {})
    return servers


def _measure(servers: dict[str, Server], seconds: float, figures: Figures) -> None:
    """One run: each figure of every proxy before the next figure."""
    for name, server in servers.items():
        load = closed_loop(server.port, server.whole, CONNECTIONS, seconds)
        figures[f"{name} req/s"].append(load.answers / load.seconds)
        figures["generator busy"].append(load.busy)
    for name, server in servers.items():
        load = closed_loop(server.port, server.stream, CONNECTIONS, seconds)
        assert load.fewest_events == EVENTS, f"{load.fewest_events} events in a stream of {name}"
        figures[f"{name} streams/s"].append(load.answers / load.seconds)
        figures["generator busy"].append(load.busy)
    for name, server in servers.items():
        load = closed_loop(server.port, server.whole, 1, seconds)
        figures[f"{name} p50 ms"].append(median(load.latencies) * 1e3)


def _tell(report: Report, figures: Figures, limited: dict[str, bool]) -> None:
    rows: list[dict[str, object]] = [
        {
            "proxy": name,
            f"req/s at {CONNECTIONS}": Spread.of(figures[f"{name} req/s"]),
            f"streams/s at {CONNECTIONS}": Spread.of(figures[f"{name} streams/s"]),
            "p50 ms at 1": Spread.of(figures[f"{name} p50 ms"]),
            "limits on": "yes" if limited[name] else "NO",
        }
        for name in limited
    ]
    report.add_table("32-token answers, requests and tokens limited in Redis, one core, median (extremes)", rows)
    report.at_least("proxies that enforced limits, share", sum(limited.values()) / len(limited), 1.0)
    report.at_most("load generator, share of its core", max(figures["generator busy"]), 0.9)
    if LITELLM in limited:
        report.notes = [f"{litellm_environment.REQUIREMENT}: how it is set up is in labs/benchmarks/litellm_proxy.py"]
        for what, least in (("req/s", 20.0), ("streams/s", 35.0)):
            report.at_least(f"{what} over LiteLLM", _ratio(figures, OURS, what), least)
            report.notes.append(f"{what} over LiteLLM, instant engine: {_ratio(figures, INSTANT, what):.1f}x")


def _ratio(figures: Figures, name: str, what: str) -> float:
    pairs = zip(figures[f"{name} {what}"], figures[f"{LITELLM} {what}"], strict=True)
    return median(ours / theirs for ours, theirs in pairs)


if __name__ == "__main__":
    sys.exit(main())
