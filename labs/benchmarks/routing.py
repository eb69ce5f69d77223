"""The worth of a router's choice, in simulation: `python -m labs.benchmarks.routing [--trace FILE=0.8,1 ...]`.

Eight replicas of Llama-3-8B on an A100 (published step times), each under the core that serves, behind the router's own
picker, which sees each replica's last report, at most a tenth of a second old, with newly cached and evicted blocks.
Requests have no deadlines, and none is refused: a request is in time when its first token comes within `IN_TIME`.
Sessions belong to four tenants of unequal size, which share nothing. The possible gain is shown by one machine with the
memory and the seats of all, which computes each step as eight equally busy ones do: it is no bound, as it orders
waiting requests by the same rule, but each prompt has all eight for itself.

Conversations are made, those of `labs.benchmarks.prefix_cache` with many times as many beginning a second, and recorded
with `--trace`: Mooncake's with their shared prefixes and Azure's without, sped up by the factors behind the file. Each
seed has its own tenants, and of a trace its own part. The hit rate is compared with an exact LRU of one cache as large
as all together.
"""

import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import mean

from admission.step_times.step_time import StepWork
from fleet.picker import Routing
from labs.benchmarks.prefix_cache import BLOCK, conversations, lru_found
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.simulated_fleet import Routed, SimulatedFleet
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES, Device
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.traces import read_trace

REPLICAS = 8
STEP_COUNTS = "prefill_tokens", "decode_tokens", "decode_context", "prefill_context", "prefill_pairs"


def _policy(device: Device, machines: int) -> SimulatedPolicy:
    """Returns how a replica serves that is as many machines."""
    sizes = f"max_num_batched_tokens={512 * machines},max_num_seqs={256 * machines},prefill_chunk=512"
    return parse_simulated_policy(f"order=fair,overload=unbounded,{sizes},max_model_len=131072", device)


def _together(device: Device, machines: int) -> Device:
    """Return one device with the speed of several that share each step evenly."""

    def seconds(work: StepWork) -> float:
        counts = (getattr(work, field) for field in STEP_COUNTS)
        return device.seconds(StepWork(*(-(-count // machines) for count in counts)))

    return replace(device, name=f"{machines} x {device.name}", seconds=seconds, kv_tokens=machines * device.kv_tokens)


DEVICE = DEVICES["llama3-8b-a100"]
POLICY = _policy(DEVICE, 1)
ALL_AS_ONE = _together(DEVICE, REPLICAS)
TENANTS: Mapping[str, float] = {"half": 0.5, "quarter": 0.25, "some": 0.15, "few": 0.1}  # of the sessions
IN_TIME = 2.0  # seconds
REQUESTS = 2_500  # of a trace
MADE_SESSIONS, MADE_SPEED = (3_500, 4_200), 400.0
"""Made conversations, half of whose turns come, and how many times as many begin a second as one machine serves with
ease: they all have begun before many end, and come back after thinking for as long as people do.
"""
AS_ONE = "all as one machine"
PREDICTED, LEAST_LOAD, WEIGHTED = Routing.PREDICTED, Routing.LEAST_LOAD, Routing.WEIGHTED
OVER_LEAST_LOAD, OVER_WEIGHTED, IMBALANCE, OF_LRU, WORSE = 0.06, 0.03, 1.3, 0.95, 0.02


def main(arguments: list[str] | None = None) -> int:
    parser: ArgumentParser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--trace", nargs="+", default=[], help="Mooncake's (JSON lines) and Azure's (CSV), with speeds")
    options = parser.parse_args(arguments)
    report = Report("routing", options.quick)
    seeds = range(1, 2 if options.quick else options.runs + 1)
    for sessions in (100,) if options.quick else MADE_SESSIONS:
        made = [_owned(_dense(conversations(seed, sessions))[: 2 * sessions], seed) for seed in seeds]
        _compare(report, f"made, {sessions:,} conversations", made)
    for said in options.trace:
        file, _, speeds = said.rpartition("=")
        for speed in map(float, speeds.split(",")):
            parts = [_part(Path(file), seed, 100 if options.quick else REQUESTS, speed) for seed in seeds]
            _compare(report, f"{Path(file).stem}, {speed:g} times as fast", parts)
    return report.finish(options.results)


def _dense(made: list[Arrival]) -> list[Arrival]:
    """Conversations that begin in faster succession, each as it was."""
    begins = dict[int, float]()
    for one in made:
        begins.setdefault(one.session, one.time)
    moved = [one._replace(time=one.time - begins[one.session] * (1 - 1 / MADE_SPEED)) for one in made]
    return sorted(moved, key=attrgetter("time"))


def _part(path: Path, seed: int, requests: int, speed: float) -> list[Arrival]:
    """A seed's own part of a trace, from time 0 on."""
    trace = read_trace(path)
    first = (seed - 1) * requests % max(1, len(trace) - requests)
    part = trace[first : first + requests]
    return _owned([one._replace(time=(one.time - part[0].time) / speed) for one in part], seed)


def _owned(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Requests of tenants by their sessions; each has a number as its key."""
    owners, random = dict[int, str](), Random(seed)
    for one in arrivals:
        if one.session not in owners:
            owners[one.session] = random.choices(list(TENANTS), list(TENANTS.values()))[0]
    return [one._replace(tenant=owners[one.session], key=str(number)) for number, one in enumerate(arrivals)]


class _Run:
    def __init__(self, arrivals: Sequence[Arrival], fleet: SimulatedFleet) -> None:
        self._routed = fleet.run(arrivals)
        self.imbalance = fleet.imbalance
        self.seconds = sorted(one.seconds for one in self._routed)
        self.in_time = _in_time(self._routed)
        by_tenant = defaultdict[str, list[Routed]](list)
        for one in self._routed:
            by_tenant[one.arrival.tenant].append(one)
        self.tenants = {name: _in_time(own) for name, own in by_tenant.items()}
        self.hits = sum(one.cached for one in self._routed) / sum(one.prompt_tokens for one in arrivals)


def _in_time(routed: Sequence[Routed]) -> float:
    return sum(one.seconds <= IN_TIME for one in routed) / len(routed)


def _compare(report: Report, name: str, works: Sequence[list[Arrival]]) -> None:
    runs: dict[str, list[_Run]] = {
        routing.value: [
            _Run(one, SimulatedFleet(REPLICAS, routing, POLICY, DEVICE, seed)) for seed, one in enumerate(works, 1)
        ]
        for routing in Routing
    }
    policy = _policy(ALL_AS_ONE, REPLICAS)
    runs[AS_ONE] = [_Run(one, SimulatedFleet(1, LEAST_LOAD, policy, ALL_AS_ONE, 1)) for one in works]
    rows: list[dict[str, object]] = [
        {
            "routing": routing,
            "in time": Spread.of([run.in_time for run in own]),
            "worst tenant": Spread.of([min(run.tenants.values()) for run in own]),
            "first token p50, s": Spread.of([quantile(run.seconds, 0.5) for run in own]),
            "p95, s": Spread.of([quantile(run.seconds, 0.95) for run in own]),
            "imbalance": Spread.of([run.imbalance for run in own]),
            "hits": Spread.of([run.hits for run in own]),
        }
        for routing, own in runs.items()
    ]
    report.add_table(f"{name}, {REPLICAS} replicas, median (extremes) of seeds", rows)
    ours = runs[PREDICTED]
    for routing, least in ((LEAST_LOAD, OVER_LEAST_LOAD), (WEIGHTED, OVER_WEIGHTED)):
        gain, as_one = (
            mean(run.in_time - other.in_time for run, other in zip(those, runs[routing], strict=True))
            for those in (ours, runs[AS_ONE])
        )
        report.at_least(f"{name}: in time, more than by {routing.value}", gain, least)
        report.notes.append(f"{name}: one machine has {as_one:.3f} more in time than {routing.value}, ours {gain:.3f}")
    report.at_most(f"{name}: imbalance, worst run", max(run.imbalance for run in ours), IMBALANCE)
    worse = [
        theirs.tenants[tenant] - share
        for run, theirs in zip(ours, runs[LEAST_LOAD], strict=True)
        for tenant, share in run.tenants.items()
    ]
    report.at_most(f"{name}: what a tenant loses by it beside least_load, worst run", max(worse), WORSE)
    if all(one.content is not None for one in works[0]):
        blocks = REPLICAS * POLICY.engine.num_blocks * POLICY.engine.block_size // BLOCK
        best = [sum(lru_found(one, blocks)) / sum(a.prompt_tokens for a in one) for one in works]
        share = mean(run.hits / ideal for run, ideal in zip(ours, best, strict=True))
        report.at_least(f"{name}: hits, of one cache of the summed size", share, OF_LRU)


if __name__ == "__main__":
    sys.exit(main())
