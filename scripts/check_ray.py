#!/usr/bin/env python3
"""Run Sluice on Ray Serve with two replicas on this machine: scripts/check_ray.py

It needs the extra `sluice[ray]`, some 500 MB, for which CI has no room. Answers and streams beside direct ones, limits
over both replicas, disconnects, SIGKILL of a gateway and of its Serve replica while they stream, a rolling update under
load, a third replica once there is work for it, and what a request takes beside a direct one. Writes
benchmarks/results/ray.json; exit status 1 when a target was missed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import yaml

from benchmarks.machine import children
from benchmarks.processes import ROOT, free_port
from benchmarks.report import RESULTS, Report
from benchmarks.served import make_keys
from gateway.tenants.key_store import KeyStore

PATIENCE = 180.0  # seconds for what takes Ray some: it starts ten processes, and each replica loads torch
MODEL, TENANT, LIMITED = "embedded", "ray", "limited"
POLICY = {"tenants": {TENANT: {}, LIMITED: {"limits": {"requests": "5/month"}}}}
SHORT = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 3 to 12."}], "temperature": 0}
LONG = SHORT | {"max_tokens": 1900, "n": 8, "ignore_eos": True, "stream": True}
SOME = SHORT | {"max_tokens": 300, "ignore_eos": True, "stream": True}
PAIRS = 60
GAUGES = r"^(?:sluice_live_requests|sluice_kv_blocks_used)\{.*\} (\S+)$"
CONFIG = ROOT / "deploy" / "ray" / "serve.yaml"
SERVE = str(Path(sys.executable).with_name("serve"))
ENVIRON = os.environ | {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
STARTED = re.compile(r"pid=(\d+)\).*serving \S+ at (http://[\d.:]+), admin at (http://[\d.:]+),")


@dataclass(frozen=True, slots=True)
class Replica:
    """A gateway and the Serve replica that owns it."""

    owner: int  # their processes
    pid: int
    url: str
    admin: str


class Site:
    """Ray Serve with the application, as its users and its operator see it."""

    def __init__(self, folder: Path, port: int, keys: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        self._folder, self._port, self._keys = folder, port, keys
        self._admin = {"authorization": f"Bearer {KeyStore(folder / 'state').admin_key()}"}

    def written(self, max_replicas: int = 2, backlog_target: float = 1000.0) -> Path:
        """Write the configuration, which is the file of this repository but for what is said here."""
        config = yaml.safe_load(CONFIG.read_text())
        flags = {"policy": self._folder / "policy.yaml", "state-dir": self._folder / "state", "threads": 1}
        flags |= {"http-workers": 0, "calibration": "off", "backlog-target": backlog_target}
        config["http_options"] |= {"host": "127.0.0.1", "port": self._port}
        args = {"flags": " ".join(f"--{name} {value}" for name, value in flags.items()), "num_cpus": 0.4}
        config["applications"][0]["args"] |= args | {"min_replicas": 2, "max_replicas": max_replicas}
        path = self._folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def deploy(self, max_replicas: int, backlog_target: float) -> None:
        """Deploy another configuration, by the address of Ray's dashboard."""
        address = re.search(r"View the dashboard at \S*?(http://[\d.:]+)", self.log.read_text())
        assert address
        subprocess.run(
            [SERVE, "deploy", "-a", address[1], str(self.written(max_replicas, backlog_target))],
            cwd=ROOT,
            env=ENVIRON,
            check=True,
        )

    def replicas(self) -> list[Replica]:
        """Return those that run."""
        started = STARTED.findall(self.log.read_text())
        return [Replica(int(one), pids[0], *urls) for one, *urls in started if (pids := _gateways(int(one)))]

    def request(self, body: dict[str, Any], url: str = "", tenant: str = TENANT) -> dict[str, Any]:
        """Return what httpx takes, for a request through Ray or to one replica."""
        headers = {"authorization": f"Bearer {self._keys[tenant]}"}
        return {"url": f"{url or self.url}/v1/chat/completions", "json": body, "headers": headers, "timeout": PATIENCE}

    def post(self, body: dict[str, Any], url: str = "", tenant: str = TENANT) -> httpx.Response:
        return httpx.post(**self.request(body, url, tenant))

    def stream(self, body: dict[str, Any], url: str = "") -> AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", **self.request(body, url))

    def is_busy(self, replica: Replica) -> bool:
        """A request lives there, or holds KV memory."""
        text = httpx.get(f"{replica.admin}/metrics", headers=self._admin, timeout=PATIENCE).text
        return any(map(float, re.findall(GAUGES, text, re.MULTILINE)))

    def answers(self, count: int) -> bool:
        """So many replicas run, and each is reached through Ray."""
        up = self.replicas()
        if len(up) != count:
            return False
        before = [self._ended(one) for one in up]
        for _ in range(4 * count):
            self.post(SHORT)
        return all(self._ended(one) > past for one, past in zip(up, before, strict=True))

    def _ended(self, replica: Replica) -> float:
        text = httpx.get(f"{replica.admin}/metrics", headers=self._admin, timeout=PATIENCE).text
        return sum(map(float, re.findall(r"^sluice_requests_total\{.*\} (\S+)$", text, re.MULTILINE)))


def main(arguments: list[str] | None = None) -> int:
    ArgumentParser(description=__doc__).parse_args(arguments)
    report = Report("ray")
    report.machine["packages"] += f", ray {version('ray')}"
    with TemporaryDirectory(prefix="sluice-ray-") as folder, serving(Path(folder)) as site:
        equal_answers(site, report)
        limits(site, report)
        disconnects(site, report)
        latency(site, report)
        rows = [
            killed(site, report, "the gateway", lambda replica: replica.pid),
            killed(site, report, "the Serve replica", lambda replica: replica.owner),
        ]
        report.add_table("one of two killed", rows)
        report.at_most("the gateway killed: requests that end without a typed error", float(str(rows[0]["untyped"])), 0)
        rolling_update(site, report)
        autoscaling(site, report)
    return report.finish(RESULTS)


def equal_answers(site: Site, report: Report) -> None:
    targets = (site.url, site.replicas()[0].url)
    whole, streamed = ([ask(url) for url in targets] for ask in (partial(_whole, site), partial(_streamed, site)))
    report.at_least("a whole answer equals a direct one", float(whole[0] == whole[1]), 1)
    report.at_least("a streamed answer equals a direct one", float(streamed[0] == streamed[1]), 1)
    with site.stream(SOME) as response:
        parts = len([*response.iter_raw()])
    report.at_least("parts in which a stream of 300 tokens comes", float(parts), 10)
    with ThreadPoolExecutor(32) as pool:
        ends = Counter(pool.map(lambda _: _end(site, SOME), range(32)))
    report.at_least("of 32 streams at once, complete", float(ends["complete"]), 32)


def _whole(site: Site, url: str) -> object:
    return site.post(SHORT, url).json()["choices"]


def _streamed(site: Site, url: str) -> list[object]:
    with site.stream(SHORT | {"stream": True}, url) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(event)["choices"] for event in events]


def limits(site: Site, report: Report) -> None:
    with ThreadPoolExecutor(6) as pool:
        statuses = Counter(pool.map(lambda _: site.post(SHORT, tenant=LIMITED).status_code, range(12)))
    report.at_least("of 12 requests of a tenant with 5, refused with 429", float(statuses[429]), 7)
    report.at_most("and answered", float(statuses[200]), 5)


def disconnects(site: Site, report: Report) -> None:
    """Measure how long after a client has left anything of its request is left on any replica."""
    for when, begin in (("while it streams", _leave_stream), ("before its answer", _leave_early)):
        waited = []
        for _ in range(10):
            begin(site)
            waited.append(_seconds(lambda: not any(map(site.is_busy, site.replicas()))))
        report.at_most(f"seconds until a client that left {when} holds no KV memory, the longest of 10", max(waited), 1)


def _leave_stream(site: Site) -> None:
    with site.stream(LONG) as response:
        parts = response.iter_raw()  # held, or it would close the connection
        begun = next(parts)
        assert any(map(site.is_busy, site.replicas())), begun


def _leave_early(site: Site) -> None:
    with suppress(httpx.ReadTimeout):
        httpx.post(**site.request(LONG | {"stream": False}) | {"timeout": 0.5})


def latency(site: Site, report: Report) -> None:
    """Ask through Ray and directly in turns, one at a time."""
    urls = (site.url, site.replicas()[0].url)
    first: dict[str, list[float]] = {url: [] for url in urls}
    whole: dict[str, list[float]] = {url: [] for url in urls}
    with httpx.Client() as client:
        for _ in range(PAIRS):
            for url in urls:
                began = time.perf_counter()
                with client.stream("POST", **site.request(SHORT | {"stream": True}, url)) as response:
                    parts = response.iter_raw()
                    next(parts)
                    first[url].append(time.perf_counter() - began)
                    list(parts)
                began = time.perf_counter()
                client.post(**site.request(SHORT, url))
                whole[url].append(time.perf_counter() - began)
    rows = []
    for what, seconds in (("first byte of a stream", first), ("whole answer of 23 tokens", whole)):
        ray, direct = (1000 * median(one) for one in seconds.values())
        rows.append({"ms, median": what, "through Ray": ray, "direct": direct, "more": ray - direct})
        report.at_most(f"ms that Ray adds to the {what}", ray - direct, 30)
    report.add_table(f"latency, {PAIRS} pairs in turns", rows)


def killed(site: Site, report: Report, what: str, pid: Callable[[Replica], int]) -> dict[str, object]:
    """SIGKILL one of two while both stream; return how all that was asked ended until there are two again."""
    victim = site.replicas()[0]
    with ThreadPoolExecutor(16) as pool, asking(site) as ends:
        streams = [pool.submit(_end, site, LONG | {"n": 2}) for _ in range(12)]
        _seconds(lambda: all(map(site.is_busy, site.replicas())))
        os.kill(pid(victim), signal.SIGKILL)
        gone = _seconds(lambda: not Path(f"/proc/{victim.pid}").exists())
        recovery = _seconds(lambda: victim.owner not in {one.owner for one in site.replicas()} and site.answers(2))
        streamed = Counter(stream.result() for stream in streams)
    report.at_most(f"{what} killed: seconds until two replicas answer", recovery, 60)
    report.at_most(f"{what} killed: seconds until the gateway has ended", gone, 10)
    untyped = sum((streamed + ends).values()) - sum((streamed + ends)[end] for end in ("complete", "replica_lost"))
    return {"SIGKILL of": what, "streams": _told(streamed), "short requests meanwhile": _told(ends), "untyped": untyped}


def rolling_update(site: Site, report: Report) -> None:
    """Deploy another configuration while two replicas stream: those of the old one end what they have begun."""
    before = {one.pid for one in site.replicas()}
    with ThreadPoolExecutor(8) as pool, asking(site) as ends:
        streams = [pool.submit(_end, site, SOME) for _ in range(8)]
        site.deploy(max_replicas=3, backlog_target=2)
        seconds = _seconds(lambda: not before & {one.pid for one in site.replicas()} and site.answers(2))
        streamed = Counter(stream.result() for stream in streams)
    report.at_most("rolling update: seconds", seconds, 120)
    lost = sum((streamed + ends).values()) - (streamed + ends)["complete"]
    report.at_most(f"rolling update: of {sum((streamed + ends).values())} requests, not answered to the end", lost, 0)


def autoscaling(site: Site, report: Report) -> None:
    with ThreadPoolExecutor(6) as pool:
        stop = Event()

        def keep_busy() -> None:
            while not stop.is_set():
                _end(site, LONG)

        for _ in range(6):
            pool.submit(keep_busy)
        seconds = _seconds(lambda: site.answers(3))
        stop.set()
    report.at_most("seconds until a third replica answers once there is work for it", seconds, 120)


@contextmanager
def asking(site: Site) -> Iterator[Counter[str]]:
    """Ask for short answers all the time while the block runs, and count how they end."""
    ends, stop = Counter[str](), Event()

    def ask() -> None:
        while not stop.wait(0.1):
            ends[_end(site, SHORT)] += 1

    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask)
        try:
            yield ends
        finally:
            stop.set()


def _end(site: Site, body: dict[str, Any]) -> str:
    """Return how a request ended: complete, the code of its error, its status if that has none, or that it was cut."""
    try:
        with site.stream(body) as response:
            text = response.read().decode()
    except httpx.TransportError:
        return "cut"
    if found := re.search(r'"code":"(\w+)"', text):
        return found[1]
    is_whole = text.endswith("data: [DONE]\n\n") if body.get("stream") else text.endswith("}")
    return "complete" if response.status_code == 200 and is_whole else f"status {response.status_code}"


def _told(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())


def _seconds(condition: Callable[[], bool]) -> float:
    """Wait until it holds, and return for how long. What cannot be asked does not hold."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        with suppress(httpx.HTTPError):
            if condition():
                return time.monotonic() - began
        time.sleep(0.02)
    raise SystemExit("it did not come true in time")


def _gateways(owner: int) -> list[int]:
    return children(owner, "fleet.bound_to_parent")


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    """Run `serve run` on a file as deploy/ray/serve.yaml, with two replicas; all has ended when the block is left."""
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    keys = make_keys(folder / "state", POLICY["tenants"])
    site = Site(folder, free_port(), keys)
    with site.log.open("wb") as log:
        command = [SERVE, "run", str(site.written())]
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRON, stdout=log, stderr=log)
    try:
        _seconds(lambda: process.poll() is not None or site.answers(2))
        yield site
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


if __name__ == "__main__":
    sys.exit(main())
