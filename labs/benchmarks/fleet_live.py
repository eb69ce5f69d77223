"""Four real replicas share the service that they have given: `python -m labs.benchmarks.fleet_live [--seconds 20]
[--runs 3]`.

`sluice serve` with the embedded model four times, over real HTTP, with one store. Four tenants always have more
requests waiting than there are rows: one on each of the four replicas, one on two of them, and two on one each. What
each has been served is read every `LOOK_INTERVAL_SECONDS` from the replicas' metrics. Fair are the weighted
max-min shares of the graph of who reaches which replica, of what the replicas have served in all: processes that share
two cores are not equally fast.

A departure is the largest of any tenant, by its weight, at any look; it is held against R times the gap of one replica,
on which all four have work, measured in the same way and the same run. Beside it the same replicas without sharing.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import yaml

from gateway.tenants.key_store import KeyStore
from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.load import post
from labs.benchmarks.max_min import Reach, max_min_shares
from labs.benchmarks.processes import free_port
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.served import make_keys
from labs.benchmarks.traffic import ClosedLoop, Traffic

REPLICAS = 4
EVERYWHERE = frozenset(range(REPLICAS))
REACH: Reach = {"all": EVERYWHERE, "half": frozenset([0, 1]), "first": frozenset([0]), "last": frozenset([3])}
WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "equal weights": dict.fromkeys(REACH, 1.0),
    "weights 4, 2, 1, 1": dict(zip(REACH, (4.0, 2.0, 1.0, 1.0), strict=True)),
}
LENGTHS = {"all": (200, 24), "half": (40, 48), "first": (90, 16), "last": (24, 64)}  # tokens of prompts and answers
CLIENTS = 12  # of each tenant at each replica
SETTINGS = {"max_num_seqs": 8, "overload": "unbounded", "threads": 1, "http_workers": 0, "prefix_cache": "off"}
LOOK_INTERVAL_SECONDS = 0.25
SETTLE_SECONDS = 2.0  # until all have learned of each other and have work waiting
SERVED = re.compile(r'^sluice_tenant_service_seconds_total\{.*tenant="(\w+)".*\} (\S+)$', re.MULTILINE)
WORDS = range(16, 1024)  # token ids behind the special ones


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 2.0) if options.quick else (options.runs, options.seconds)
    report = Report("fleet_live", options.quick)
    for title, weights in WEIGHTS.items():
        _compare(report, title, weights, runs, seconds)
    return report.finish(options.results)


def _compare(report: Report, title: str, weights: Mapping[str, float], runs: int, seconds: float) -> None:
    gaps, shared, alone = [], list[Measured](), list[Measured]()
    for run in range(runs):
        with _fleet(weights, "on") as fleet:
            gaps.append(fleet.gap(run, seconds))
            shared.append(fleet.measure(run, seconds))
        with _fleet(weights, "off") as fleet:
            alone.append(fleet.measure(run, seconds))
    rows: list[dict[str, object]] = []
    for debts, measured in (("shared", shared), ("of each alone", alone)):
        away = [one.departure / REPLICAS / gap for one, gap in zip(measured, gaps, strict=True)]
        shares = {name: Spread.of([one.shares[name] for one in measured]) for name in REACH}
        rows.append({"debts": debts, "departure, R gaps": Spread.of(away)} | shares)
    rows.append({"debts": "fair", "departure, R gaps": 0} | {n: Spread.of([m.fair[n] for m in shared]) for n in REACH})
    report.add_table(f"{title}: largest departure, and engine seconds a second, median (extremes)", rows)
    report.notes.append(f"{title}: the gap of one replica is {Spread.of(gaps)} s")
    worst = max(one.departure / REPLICAS / gap for one, gap in zip(shared, gaps, strict=True))
    report.at_most(f"{title}: worst departure, R gaps", worst, 1.0)
    pairs = zip(alone, shared, strict=True)
    report.at_least(
        f"{title}: departure without sharing, times it", median(a.departure / s.departure for a, s in pairs), 2.0
    )


@dataclass(slots=True)
class Measured:
    """The service of tenants, in seconds of engine time a second, and the largest departure of one from its share."""

    departure: float  # seconds, by weight
    shares: dict[str, float]
    fair: dict[str, float]


@dataclass(slots=True)
class _Fleet:
    ports: list[int]
    admin_ports: list[int]
    keys: Mapping[str, str]
    admin_key: str
    weights: Mapping[str, float]

    def gap(self, seed: int, seconds: float) -> float:
        """Returns the most by which the service of two tenants drifts apart on one replica, by weight."""
        reach = dict.fromkeys(REACH, frozenset([0]))
        heaviest = max(self.weights.values())
        drift = []
        for _, (now, *_) in self._looks(reach, seed, seconds):
            by_weight = [now[name] * heaviest / self.weights[name] for name in reach]
            drift.append(dict(zip(reach, by_weight, strict=True)))
        pairs = [(one, other) for one in reach for other in reach if one != other]
        spans = [[at[one] - at[other] for at in drift] for one, other in pairs]
        return max(max(span) - min(span) for span in spans)

    def measure(self, seed: int, seconds: float) -> Measured:
        looks = list(self._looks(REACH, seed, seconds))
        capacity = [sum(now.values()) for now in looks[-1][1]]
        total, heaviest, departure = sum(capacity), max(self.weights.values()), 0.0
        fair = max_min_shares(REACH, self.weights, dict(enumerate(capacity)))
        for _, replicas in looks:
            served = Counter[str]()
            for now in replicas:
                served.update(now)
            progress = sum(served.values()) / total
            for name, share in fair.items():
                departure = max(departure, abs(served[name] - share * progress) * heaviest / self.weights[name])
        elapsed = looks[-1][0]
        ended = {name: sum(now[name] for now in looks[-1][1]) / elapsed for name in REACH}
        return Measured(departure, ended, {name: share / elapsed for name, share in fair.items()})

    def _looks(self, reach: Reach, seed: int, seconds: float) -> Iterator[tuple[float, list[Counter[str]]]]:
        """Keep all tenants waiting where they reach; yields now and then the seconds that have passed, and what each
        replica has served since.
        """
        with ThreadPoolExecutor(REPLICAS) as threads:
            load = [
                threads.submit(self._load, replica, reach, seed, SETTLE_SECONDS + seconds)
                for replica in range(REPLICAS)
            ]
            time.sleep(SETTLE_SECONDS)
            before, began = self._served(), time.monotonic()
            while (elapsed := time.monotonic() - began) < seconds - LOOK_INTERVAL_SECONDS:
                time.sleep(LOOK_INTERVAL_SECONDS)
                now = self._served()
                yield (
                    elapsed + LOOK_INTERVAL_SECONDS,
                    [Counter({name: n[name] - b[name] for name in REACH}) for n, b in zip(now, before, strict=True)],
                )
            for one in load:
                one.result()

    def _load(self, replica: int, reach: Reach, seed: int, seconds: float) -> None:
        random = Random(f"{seed} {replica}")
        loops = {
            name: ClosedLoop(CLIENTS, self._requests(name, random)) for name, where in reach.items() if replica in where
        }
        with Traffic(self.ports[replica]) as clients:
            clients.run(seconds, loops=loops)

    def _requests(self, tenant: str, random: Random) -> Iterator[bytes]:
        while True:
            prompt, answer = (max(1, int(mean * random.uniform(0.5, 1.5))) for mean in LENGTHS[tenant])
            body = {"prompt": random.choices(WORDS, k=prompt), "max_tokens": answer, "ignore_eos": True, "stream": True}
            yield post("/v1/completions", {"model": "embedded"} | body, self.keys[tenant])

    def _served(self) -> list[Counter[str]]:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        texts = [httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers).text for port in self.admin_ports]
        return [Counter({tenant: float(value) for tenant, value in SERVED.findall(text)}) for text in texts]


@contextmanager
def _fleet(weights: Mapping[str, float], shared_debts: str) -> Iterator[_Fleet]:
    with TemporaryDirectory() as folder, ExitStack() as running:
        directory = Path(folder)
        policy = directory / "policy.yaml"
        policy.write_text(yaml.safe_dump({"tenants": {name: {"weight": weight} for name, weight in weights.items()}}))
        keys = make_keys(directory, REACH)
        ports, admin_ports = [], [free_port() for _ in range(REPLICAS)]
        for admin_port in admin_ports:
            own = {"policy": policy, "admin_port": admin_port, "shared_debts": shared_debts}
            ports.append(running.enter_context(gateway_process(directory, None, **SETTINGS, **own)).port)
        yield _Fleet(ports, admin_ports, keys, KeyStore(directory).admin_key(), weights)


if __name__ == "__main__":
    sys.exit(main())
