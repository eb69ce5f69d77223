#!/usr/bin/env python3
"""Run four replicas on this machine behind `sluice route`, behind Envoy that asks `sluice pick`, and behind SGLang's
router: `scripts/check_fleet.py [--only NAME ...]`.

Real `sluice serve` of the embedded model with one store. Answers and streams beside direct ones, limits over all four,
disconnects, and SIGKILL of one replica while all stream and short requests come: through our router nothing ends
without a typed error, short requests are tried again elsewhere, and streams are charged by what was delivered. Envoy
and SGLang's router (smg) are installed for it and untouched: how requests end there when a replica is killed is their
own business, and shown. Writes labs/benchmarks/results/fleet.json; exit status 1 when a target was missed.
"""

import os
import re
import signal
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import yaml

from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.processes import background, free_port
from labs.benchmarks.report import RESULTS, Report
from labs.benchmarks.served import make_keys
from scripts.envoy import envoy
from scripts.fleet_checks import (
    LONG,
    POLICY,
    SHORT,
    SOME,
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

COUNT = 4
SMG = "smg==1.13.0"
MAX_ADDED_MS = 10.0  # ms at p50, where two cores are shared by all
STREAMS = 24  # when a replica is killed
ENDS = ("complete", "replica_lost")
ROUTER = "sluice route"


class FleetSite(Site):
    """Replicas, and the front before them."""

    def __init__(self, front: str, folder: Path, port: int, keys: Mapping[str, str], served: list[Replica]) -> None:
        super().__init__(front, folder, port, keys)
        self._served = served

    def replicas(self) -> Sequence[Replica]:
        return [one for one in self._served if _runs(one.pid)]


def main(arguments: list[str] | None = None) -> int:
    fronts: dict[str, Front] = {ROUTER: _router, "envoy": _envoy, "smg": _smg}
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=fronts, default=[*fronts], help="fronts (default: all)")
    only = parser.parse_args(arguments).only
    report = Report("fleet")
    rows = {name: _check(report, name, front) for name, front in fronts.items() if name in only}
    report.add_table(
        f"one of {COUNT} replicas killed, {STREAMS} streams and short requests meanwhile", [*rows.values()]
    )
    if ROUTER in rows:
        report.at_most(f"{ROUTER}: requests that end without a typed error", float(str(rows[ROUTER]["untyped"])), 0)
    return report.finish(RESULTS)


Front = Callable[[Path, list[Replica], int], AbstractContextManager[None]]
"""Runs a front before replicas at a port, with their state in the folder."""


def _check(report: Report, name: str, front: Front) -> dict[str, object]:
    with TemporaryDirectory(prefix="sluice-fleet-") as directory, ExitStack() as running:
        folder = Path(directory)
        (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
        keys = make_keys(folder / "state", POLICY["tenants"])
        served = [running.enter_context(_replica(folder)) for _ in range(COUNT)]
        port = free_port()
        running.enter_context(front(folder, served, port))
        site = FleetSite(name, folder, port, keys, served)
        seconds_until(lambda: site.post(SHORT).status_code == httpx.codes.OK)
        own = Report("fleet")
        equal_answers(site, own)
        limits(site, own)
        disconnects(site, own)
        latency(site, own, MAX_ADDED_MS)
        report.targets += [replace(target, what=f"{name}: {target.what}") for target in own.targets]
        report.tables |= {f"{name}: {title}": rows for title, rows in own.tables.items()}
        return _killed(site)


def _killed(site: FleetSite) -> dict[str, object]:
    """SIGKILL one replica while streams go through all; returns the ends of all requests."""
    with ThreadPoolExecutor(STREAMS) as pool, asking(site) as ends:
        streams = [pool.submit(end, site, LONG | {"n": 1 + number % 2}) for number in range(STREAMS)]
        seconds_until(lambda: all(map(site.is_busy, site.replicas())))
        os.kill(site.replicas()[0].pid, signal.SIGKILL)
        streamed = Counter(stream.result() for stream in streams)
        seconds_until(lambda: end(site, SOME) == "complete" and end(site, SHORT) == "complete")
    seconds_until(lambda: not any(map(site.is_busy, site.replicas())))
    untyped = sum((streamed + ends).values()) - sum((streamed + ends)[one] for one in ENDS)
    return {"behind": site.front, "streams": told(streamed), "short requests": told(ends), "untyped": untyped}


@contextmanager
def _replica(folder: Path) -> Iterator[Replica]:
    admin_port = free_port()
    settings = {"policy": folder / "policy.yaml", "admin_port": admin_port, "threads": 1, "http_workers": 0}
    settings |= {"calibration": "off", "public_models": "on"}
    with gateway_process(folder / "state", None, **settings) as process:
        yield Replica(process.pid, f"http://127.0.0.1:{process.port}", f"http://127.0.0.1:{admin_port}")


@contextmanager
def _router(folder: Path, served: list[Replica], port: int) -> Iterator[None]:
    with background(_sluice("route", folder, served, port), folder / "router.log"):
        yield


@contextmanager
def _envoy(folder: Path, served: list[Replica], port: int) -> Iterator[None]:
    picker_port = free_port()
    picking = background(_sluice("pick", folder, served, picker_port), folder / "picker.log")
    with picking, envoy(folder, port, picker_port, [one.url for one in served]):
        yield


def _sluice(what: str, folder: Path, served: list[Replica], port: int) -> list[str]:
    file = folder / "replicas.yaml"
    file.write_text(yaml.safe_dump({"replicas": [{"url": one.url, "admin": one.admin} for one in served]}))
    command = [sys.executable, "-m", "sluice", what, f"--replicas={file}", f"--port={port}", "--admin-port=off"]
    return [*command, f"--policy={folder / 'policy.yaml'}", f"--state-dir={folder / 'state'}", "--log-level=warning"]


@contextmanager
def _smg(folder: Path, served: list[Replica], port: int) -> Iterator[None]:
    command = [str(own_environment(SMG) / "smg"), "launch", "--worker-urls", *(one.url for one in served)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with background(command, folder / "smg.log"):
        yield


def _runs(pid: int) -> bool:
    """True if the process runs, and is no zombie."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and re.search(r"^State:\s+[ZX]", status.read_text(), re.MULTILINE) is None


if __name__ == "__main__":
    sys.exit(main())
