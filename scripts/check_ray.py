#!/usr/bin/env python3
"""Run Sluice on Ray Serve with four replicas on this machine: `scripts/check_ray.py`.

It needs the extra `ray`, some 500 MB, for which CI has no room. Answers and streams beside direct ones, limits
over all replicas, disconnects, SIGKILL of a gateway and of its Serve replica while they stream, a rolling update under
load, one more replica once there is work for it, and what a request takes beside a direct one. Writes
labs/benchmarks/results/ray.json; exit status 1 when a target was missed.
"""

import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import yaml

from backend.bound_process import bound
from backend.timed_run import end_group
from labs.benchmarks.machine import children
from labs.benchmarks.processes import ROOT, free_port
from labs.benchmarks.report import RESULTS, Report
from labs.benchmarks.served import make_keys
from scripts.fleet_checks import (
    LONG,
    POLICY,
    SHORT,
    SOME,
    TIMEOUT_SECONDS,
    Replica,
    Site,
    asking,
    disconnects,
    end,
    equal_answers,
    latency,
    limits,
    seconds_until,
    told,
)

CONFIG = ROOT / "deploy" / "ray" / "serve.yaml"
REPLICAS = 4
STREAMS = 24
SERVE = str(Path(sys.executable).with_name("serve"))
ENVIRON = os.environ | {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
STARTED = re.compile(r"pid=(\d+)\).*serving \S+ at (http://[\d.:]+), admin at (http://[\d.:]+),")


@dataclass(frozen=True, slots=True)
class OwnedReplica(Replica):
    """A gateway with the Serve replica that owns it."""

    owner: int  # its process


class RaySite(Site):
    """Ray Serve with the application, as its users and its operator see it."""

    def __init__(self, folder: Path, port: int, keys: Mapping[str, str]) -> None:
        super().__init__("Ray", folder, port, keys)
        self.log = folder / "serve.log"

    def written(self, max_replicas: int = REPLICAS, backlog_target: float = 1000.0) -> Path:
        """Write the configuration, which is the file of this repository but for what is said here."""
        config = yaml.safe_load(CONFIG.read_text())
        flags = {"policy": self._folder / "policy.yaml", "state-dir": self._folder / "state", "threads": 1}
        flags |= {"http-workers": 0, "calibration": "off", "backlog-target": backlog_target}
        config["http_options"] |= {"host": "127.0.0.1", "port": self._port}
        args = {"flags": " ".join(f"--{name} {value}" for name, value in flags.items()), "num_cpus": 0.2}
        config["applications"][0]["args"] |= args | {"min_replicas": REPLICAS, "max_replicas": max_replicas}
        path = self._folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def deploy(self, max_replicas: int, backlog_target: float) -> None:
        """Deploy another configuration, by the address of Ray's dashboard."""
        address = re.search(r"View the dashboard at \S*?(http://[\d.:]+)", self.log.read_text())
        assert address
        subprocess.run(
            **bound([SERVE, "deploy", "-a", address[1], str(self.written(max_replicas, backlog_target))]),
            cwd=ROOT,
            env=ENVIRON,
            check=True,
        )

    def replicas(self) -> list[OwnedReplica]:
        """Return the running replicas."""
        started = STARTED.findall(self.log.read_text())
        return [OwnedReplica(pids[0], *urls, int(one)) for one, *urls in started if (pids := _gateways(int(one)))]

    def answers(self, count: int) -> bool:
        """True if `count` replicas run and each is reached through Ray."""
        up = self.replicas()
        if len(up) != count:
            return False
        before = [self._ended(one) for one in up]
        for _ in range(4 * count):
            self.post(SHORT)
        return all(self._ended(one) > past for one, past in zip(up, before, strict=True))

    def _ended(self, replica: Replica) -> float:
        text = httpx.get(f"{replica.admin}/metrics", headers=self.admin, timeout=TIMEOUT_SECONDS).text
        return sum(map(float, re.findall(r"^sluice_requests_total\{.*\} (\S+)$", text, re.MULTILINE)))


def main(arguments: list[str] | None = None) -> int:
    ArgumentParser(description=__doc__).parse_args(arguments)
    report = Report("ray")
    report.machine["packages"] += f", ray {version('ray')}"
    with TemporaryDirectory(prefix="sluice-ray-") as folder, serving(Path(folder)) as site:
        equal_answers(site, report)
        limits(site, report)
        disconnects(site, report)
        latency(site, report, 30)
        rows = [
            killed(site, report, "the gateway", lambda replica: replica.pid),
            killed(site, report, "the Serve replica", lambda replica: replica.owner),
        ]
        report.add_table(f"one of {REPLICAS} killed", rows)
        report.at_most("the gateway killed: requests that end without a typed error", float(str(rows[0]["untyped"])), 0)
        rolling_update(site, report)
        autoscaling(site, report)
    return report.finish(RESULTS)


def killed(site: RaySite, report: Report, what: str, pid: Callable[[OwnedReplica], int]) -> dict[str, object]:
    """SIGKILL one replica while all stream; returns the ends of all requests until there are as many replicas again."""
    victim = site.replicas()[0]
    with ThreadPoolExecutor(STREAMS) as pool, asking(site) as ends:
        streams = [pool.submit(end, site, LONG | {"n": 2}) for _ in range(STREAMS)]
        seconds_until(lambda: all(map(site.is_busy, site.replicas())))
        os.kill(pid(victim), signal.SIGKILL)
        gone = seconds_until(lambda: not Path(f"/proc/{victim.pid}").exists())
        recovery = seconds_until(
            lambda: victim.owner not in {one.owner for one in site.replicas()} and site.answers(REPLICAS)
        )
        streamed = Counter(stream.result() for stream in streams)
    report.at_most(f"{what} killed: seconds until {REPLICAS} replicas answer", recovery, 60)
    report.at_most(f"{what} killed: seconds until the gateway has ended", gone, 10)
    untyped = sum((streamed + ends).values()) - sum((streamed + ends)[end] for end in ("complete", "replica_lost"))
    return {"SIGKILL of": what, "streams": told(streamed), "short requests meanwhile": told(ends), "untyped": untyped}


def rolling_update(site: RaySite, report: Report) -> None:
    """Deploy another configuration while all replicas stream: the old ones end their open requests."""
    before = {one.pid for one in site.replicas()}
    with ThreadPoolExecutor(8) as pool, asking(site) as ends:
        streams = [pool.submit(end, site, SOME) for _ in range(8)]
        site.deploy(max_replicas=REPLICAS + 1, backlog_target=2)
        seconds = seconds_until(lambda: not before & {one.pid for one in site.replicas()} and site.answers(REPLICAS))
        streamed = Counter(stream.result() for stream in streams)
    report.at_most("rolling update: seconds", seconds, 120)
    lost = sum((streamed + ends).values()) - (streamed + ends)["complete"]
    report.at_most(f"rolling update: of {sum((streamed + ends).values())} requests, not answered to the end", lost, 0)


def autoscaling(site: RaySite, report: Report) -> None:
    with ThreadPoolExecutor(2 * REPLICAS) as pool:
        stop = Event()

        def keep_busy() -> None:
            while not stop.is_set():
                end(site, LONG)

        for _ in range(2 * REPLICAS):
            pool.submit(keep_busy)
        seconds = seconds_until(lambda: site.answers(REPLICAS + 1))
        stop.set()
    report.at_most("seconds until one more replica answers once there is work for it", seconds, 120)


def _gateways(owner: int) -> list[int]:
    return children(owner, "backend.bound_to_parent")


@contextmanager
def serving(folder: Path) -> Iterator[RaySite]:
    """Run `serve run` on a file as deploy/ray/serve.yaml, with all replicas; all has ended when the block is left."""
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    keys = make_keys(folder / "state", POLICY["tenants"])
    site = RaySite(folder, free_port(), keys)
    with site.log.open("wb") as log:
        command = [SERVE, "run", str(site.written())]
        process = subprocess.Popen(**bound(command), cwd=ROOT, env=ENVIRON, stdout=log, stderr=log)
    try:
        seconds_until(lambda: process.poll() is not None or site.answers(REPLICAS))
        yield site
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(TIMEOUT_SECONDS)
        finally:
            end_group(process)


if __name__ == "__main__":
    sys.exit(main())
