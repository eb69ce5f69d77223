"""The worth of a router's choice, live: `python -m labs.benchmarks.routing_live [--seconds 60] [--runs 3]`.

`sluice route` before four gateways in processes of their own, each with its scheduler, its device threads and a device
that only takes time: 10 ms a step and 1 ms for each token of a prompt, as a GPU would for prompts ten times as long
(the embedded model's context is 2,048 tokens). Chats of four tenants of unequal size, who share nothing, begin as they
come and go on after a time to think; each turn brings all before it. A request is in time when its first token comes
within `IN_TIME` of when it was due. The same timetable is served by each way to choose, by a fleet of its own.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory

import httpx
import yaml

from backend.bound_process import bound
from fleet.picker import Routing
from labs.benchmarks.load import post
from labs.benchmarks.processes import ROOT, Worker, WorkerFailed
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import make_keys
from labs.benchmarks.traffic import Due, Exchange, Traffic

REPLICAS = 4
TENANTS: Mapping[str, float] = {"half": 0.5, "quarter": 0.25, "some": 0.15, "few": 0.1}  # of the sessions
SESSIONS = 5.0  # beginning each second
TURNS = (2, 8)
THINKING = 5.0  # seconds between two turns, on average
SYSTEM_WORDS, TURN_WORDS = 220, (10, 60)  # of a tenant's three system prompts, and of each turn
ANSWER = 24  # tokens
WORDS = ("one", "two", "three", "story", "number", "river", "house", "again", "count", "letter")
DEVICE = ("--step-ms=10", "--prompt-us=1000", "--token-us=50", "--calibrate")
IN_TIME = 2.0  # seconds
DRAIN = 60.0
ADMIN_KEY = "correct-horse-battery-staple"
ROUTINGS = (Routing.PREDICTED, Routing.LEAST_LOAD, Routing.WEIGHTED)
OVER_LEAST_LOAD, OVER_WEIGHTED, IMBALANCE, WORSE = 0.06, 0.03, 1.3, 0.02


@dataclass(slots=True)
class Measured:
    """The results of one run's timetable."""

    exchanges: Sequence[Exchange]
    attempts: list[float]  # by replica
    found: float  # of the prompts' tokens, in a cache
    waits: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.waits = sorted(_waited(one) for one in self.exchanges)

    @property
    def in_time(self) -> float:
        return sum(wait <= IN_TIME for wait in self.waits) / len(self.waits)

    def in_time_of(self, tenant: str) -> float:
        waits = [_waited(one) for one in self.exchanges if one.tenant == tenant]
        return sum(wait <= IN_TIME for wait in waits) / max(1, len(waits))

    @property
    def imbalance(self) -> float:
        return max(self.attempts) / mean(self.attempts)


def _waited(exchange: Exchange) -> float:
    """The seconds to the first token; of a request that had none, for ever."""
    return float("inf") if exchange.first is None else exchange.first - exchange.due


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="in which sessions begin, of each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 4.0) if options.quick else (options.runs, options.seconds)
    report = Report("routing_live", options.quick)
    measured: dict[Routing, list[Measured]] = {routing: [] for routing in ROUTINGS}
    for seed in range(1, runs + 1):
        for routing in ROUTINGS:
            measured[routing].append(_measure(routing, seed, seconds))
    _tell(report, measured)
    return report.finish(options.results)


def _measure(routing: Routing, seed: int, seconds: float) -> Measured:
    with _fleet(routing) as fleet, Traffic(fleet.port) as clients:
        heard = clients.run(seconds + DRAIN, fleet.timetable(seed, seconds), until_answered=True)
        found, asked = fleet.total("vllm:prefix_cache_hits_total"), fleet.total("vllm:prefix_cache_queries_total")
        return Measured(heard.exchanges, fleet.attempts(), found / max(1.0, asked))


@dataclass(frozen=True, slots=True)
class _Fleet:
    """A router before its replicas."""

    port: int
    router_admin: int
    admin_ports: list[int]
    keys: Mapping[str, str]

    def timetable(self, seed: int, seconds: float) -> list[Due]:
        """Returns the turns of all sessions that begin, of as many as are due by then."""
        random, begins, due = Random(seed), 0.0, list[Due]()
        systems = {name: [_text(random, SYSTEM_WORDS) for _ in range(3)] for name in TENANTS}
        while (begins := begins + random.expovariate(SESSIONS)) < seconds:
            (tenant,) = random.choices(list(TENANTS), list(TENANTS.values()))
            messages = [{"role": "system", "content": random.choice(systems[tenant])}]
            at = begins
            for _ in range(random.randint(*TURNS)):
                messages.append({"role": "user", "content": _text(random, random.randint(*TURN_WORDS))})
                if at < seconds:
                    due.append(Due(at, tenant, self._request(tenant, messages)))
                messages.append({"role": "assistant", "content": _text(random, ANSWER)})
                at += 1.0 + random.expovariate(1 / THINKING)
        return sorted(due)

    def _request(self, tenant: str, messages: list[dict[str, str]]) -> bytes:
        body = {"model": "embedded", "messages": messages, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
        return post("/v1/chat/completions", body, self.keys[tenant])

    def total(self, metric: str) -> float:
        """Returns the sum of a metric over the replicas."""
        pattern = re.compile(rf"^{metric}(?:\{{.*\}})? (\S+)$", re.MULTILINE)
        return sum(float(value) for port in self.admin_ports for value in pattern.findall(_ask(port, "/metrics").text))

    def attempts(self) -> list[float]:
        """Returns how many the router has made at each replica."""
        return [one["attempts"] for one in _ask(self.router_admin, "/admin/v1/fleet").json()["replicas"]]


def _ask(admin_port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{admin_port}{path}", headers={"authorization": f"Bearer {ADMIN_KEY}"})


def _text(random: Random, words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


@contextmanager
def _fleet(routing: Routing) -> Iterator[_Fleet]:
    os.environ["SLUICE_ADMIN_KEY"] = ADMIN_KEY
    with TemporaryDirectory() as folder, ExitStack() as running:
        directory = Path(folder)
        keys = make_keys(directory, TENANTS)
        policy = directory / "policy.yaml"
        policy.write_text(yaml.safe_dump({"tenants": {name: {} for name in TENANTS}}))
        chosen = {"state_dir": directory, "policy": policy, "admin_port": 0, "overload": "unbounded", "http_workers": 0}
        command = [sys.executable, "-m", "labs.benchmarks.gateway_server", *DEVICE]
        command += [f"--set={name}={value}" for name, value in chosen.items()]
        workers = [running.enter_context(Worker(command, None)) for _ in range(REPLICAS)]
        file = directory / "replicas.yaml"
        at = "http://127.0.0.1:{}".format
        rows = [{"url": at(one.ready["port"]), "admin": at(one.ready["admin_port"])} for one in workers]
        file.write_text(yaml.safe_dump({"replicas": rows}))
        flags = {"replicas": file, "routing": routing.value, "policy": policy, "state-dir": directory}
        port, admin_port = running.enter_context(_router(flags))
        yield _Fleet(port, admin_port, [one.ready["admin_port"] for one in workers], keys)


@contextmanager
def _router(flags: Mapping[str, object]) -> Iterator[tuple[int, int]]:
    """Run one; yields its port and its admin port."""
    given = {"port": 0, "admin-port": 0, "log-level": "warning", **flags}
    command = [sys.executable, "-m", "sluice", "route", *(f"--{name}={value}" for name, value in given.items())]
    process = subprocess.Popen(**bound(command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = list[int]()
        for line in process.stdout:
            ports += map(int, re.findall(r"http://[\d.]+:(\d+)", line))
            if len(ports) >= 2:  # its own, then that of its admin
                yield ports[0], ports[1]
                return
        raise WorkerFailed(f"sluice route ended with status {process.wait()}")
    finally:
        process.terminate()
        process.communicate()


def _tell(report: Report, measured: Mapping[Routing, Sequence[Measured]]) -> None:
    rows: list[dict[str, object]] = [
        {
            "routing": routing.value,
            "in time": Spread.of([one.in_time for one in own]),
            "worst tenant": Spread.of([min(map(one.in_time_of, TENANTS)) for one in own]),
            "first token p50, s": Spread.of([quantile(one.waits, 0.5) for one in own]),
            "p95, s": Spread.of([quantile(one.waits, 0.95) for one in own]),
            "imbalance": Spread.of([one.imbalance for one in own]),
            "found in a cache": Spread.of([one.found for one in own]),
        }
        for routing, own in measured.items()
    ]
    report.add_table(f"{REPLICAS} replicas, {SESSIONS:g} sessions a second, median (extremes)", rows)
    ours = measured[Routing.PREDICTED]
    for routing, least in ((Routing.LEAST_LOAD, OVER_LEAST_LOAD), (Routing.WEIGHTED, OVER_WEIGHTED)):
        gain = mean(one.in_time - other.in_time for one, other in zip(ours, measured[routing], strict=True))
        report.at_least(f"in time, more than by {routing.value}", gain, least)
    report.at_most("imbalance, worst run", max(one.imbalance for one in ours), IMBALANCE)
    pairs = zip(ours, measured[Routing.LEAST_LOAD], strict=True)
    worse = max(other.in_time_of(name) - one.in_time_of(name) for one, other in pairs for name in TENANTS)
    report.at_most("in time, less than by least_load, worst tenant and run", worse, WORSE)


if __name__ == "__main__":
    sys.exit(main())
