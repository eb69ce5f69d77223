"""The worth of the prefix cache to each of 64 tenants: `python -m labs.benchmarks.prefix_tenants [--trace FILE] [--runs
2]`.

The device and the conversations of `prefix_cache`, with seeds of its own, and a Mooncake trace. Sessions are
kept whole and dealt to 64 tenants, equally, or so that the n-th has 1/n of the first's. A tenant finds nothing of
another, so each computes the system prompts. Requests are served in fair order with the cache and without, from pools
of two sizes. Beside them an exact LRU of as many blocks, which tells tenants apart as well, sees the same prompts one
after the other, computes in no time and needs no memory for anything else.

Shown are all requests, the tenant that fares worst, and the worst quarter of the requests by the lengths of prompts:
their hits over those of the LRU, of tenants for which it finds at least a hundredth of all that it finds; and the
median and the 99th percentile of their first tokens over those without the cache, of tenants with 50 requests or more.
A tenant has a few dozen requests, and whether one of its prefixes is given up a little sooner or later is chance: the
one that fares best is shown as well, and neither is judged.
"""

import gc
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from backend.scheduler.sequence import Sequence as EngineSequence
from labs.benchmarks.prefix_cache import DEVICE, ENGINE, OF_LRU, conversations, lru_found, traced
from labs.benchmarks.report import Report, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder, TrackedRequest

FAIR = ENGINE.replace("order=fcfs", "order=fair")
TENANTS = 64
SHARES = {"equal": [1.0] * TENANTS, "skewed": [1 / (n + 1) for n in range(TENANTS)]}
MADE_POOLS, TRACED_POOLS = (8_000, 27_000), (27_000, 100_000)  # blocks
SEED, SESSIONS, TRACED = 31, 600, 3_000
LEAST_FOUND, LEAST_REQUESTS = 0.01, 50
MIN_SHARE_OF_LRU_HITS = 0.9  # of the LRU's hits, for the lengths that fare worst


@dataclass(frozen=True, slots=True)
class Served:
    """The result of one request."""

    arrival: Arrival
    first_token: float  # seconds
    found: int  # tokens of its prompt


class NotingRecorder(Recorder):
    """Keeps each request that was completed."""

    def __init__(self) -> None:
        super().__init__(DEVICE, Objective(), {})
        self.served: list[Served] = []

    def _done(self, sequence: EngineSequence, request: TrackedRequest, now: float) -> None:
        super()._done(sequence, request, now)
        first = request.first_token - request.arrival.time
        self.served.append(Served(request.arrival, first, sequence.num_cached_tokens))


def main(arguments: list[str] | None = None) -> int:
    parser: ArgumentParser = scenario_parser(__doc__, runs=2)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, JSON lines")
    options = parser.parse_args(arguments)
    report = Report("prefix_tenants", options.quick)
    rows: list[dict[str, Any]] = []
    for name, arrivals in _workloads(options.trace, 1 if options.quick else options.runs, options.quick):
        pools = TRACED_POOLS if name.startswith("traced") else MADE_POOLS
        rows += [{"workload": name, "blocks": blocks} | _compare(arrivals, blocks) for blocks in pools]
    report.add_table("64 tenants: hits, of an exact LRU's, and first tokens, of those without the cache", rows)
    for what, bound in (("all", OF_LRU), ("worst lengths", MIN_SHARE_OF_LRU_HITS)):
        report.at_least(f"hits, of an exact LRU's, {what}, worst run", min(row[f"hits, {what}"] for row in rows), bound)
    worst = max(row["p50, worst lengths"] for row in rows)
    report.at_most("median first token of that without the cache, worst lengths and run", worst, 1.0)
    return report.finish(options.results)


def _workloads(trace: Path | None, runs: int, quick: bool) -> Iterator[tuple[str, list[Arrival]]]:
    for seed in range(SEED, SEED + runs):
        made = conversations(seed, 60 if quick else SESSIONS)
        for name, shares in SHARES.items():
            yield f"made, {name}, seed {seed}", with_tenants(made, shares, seed)
    if trace is not None:
        arrivals = traced(trace, 100 if quick else TRACED)
        for name, shares in SHARES.items():
            yield f"traced, {name}", with_tenants(arrivals, shares, SEED)


def with_tenants(arrivals: Iterable[Arrival], shares: Sequence[float], seed: int) -> list[Arrival]:
    """Returns them with tenants: whole sessions, each tenant's number of them by its share."""
    random, tenants = Random(seed), dict[int, str]()
    names = [f"tenant-{n}" for n in range(1, len(shares) + 1)]
    made = []
    for arrival in arrivals:
        if arrival.session not in tenants:
            tenants[arrival.session] = random.choices(names, shares)[0]
        made.append(arrival._replace(tenant=tenants[arrival.session]))
    return made


def _compare(arrivals: list[Arrival], blocks: int) -> dict[str, Any]:
    cached, without = (_run(arrivals, f"num_blocks={blocks},prefix_cache={on}") for on in ("on", "off"))
    best = list(zip(arrivals, lru_found(arrivals, blocks), strict=True))
    lengths = sorted(arrival.prompt_tokens for arrival in arrivals)
    cuts = [lengths[len(lengths) * n // 4] for n in (1, 2, 3)]

    def quarter(arrival: Arrival) -> int:
        return sum(arrival.prompt_tokens > cut for cut in cuts)

    def tenant(arrival: Arrival) -> str:
        return arrival.tenant

    hits = sum(served.found for served in cached) / sum(arrival.prompt_tokens for arrival in arrivals)
    row: dict[str, Any] = {"hits": hits, "hits, all": of_lru(cached, best, lambda _: 0)}
    row |= {"hits, worst tenant": of_lru(cached, best, tenant), "best tenant": of_lru(cached, best, tenant, max)}
    row["hits, worst lengths"] = of_lru(cached, best, quarter)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        row[f"{name} s"], row[f"off {name} s"] = (_first(run, share) for run in (cached, without))
        row[f"{name}, worst tenant"] = of_off(cached, without, share, tenant)
        row[f"{name}, worst lengths"] = of_off(cached, without, share, quarter)
    return row


def _run(arrivals: list[Arrival], settings: str) -> list[Served]:
    longest = max(arrival.most_tokens for arrival in arrivals)
    policy = parse_simulated_policy(f"{FAIR},max_model_len={longest + 1},{settings}", DEVICE)
    recorder = NotingRecorder()
    gc.disable()
    try:
        Loop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len).run(arrivals)
    finally:
        gc.enable()
    return recorder.served


Group = Callable[[Arrival], object]


def of_lru(
    served: Iterable[Served],
    best: Iterable[tuple[Arrival, int]],
    group: Group,
    choose: Callable[[Iterable[float]], float] = min,
) -> float:
    """Returns what was found over what the LRU has, of the group that fares worst, or of another choice."""
    ours, exact = Counter[object](), Counter[object]()
    for one in served:
        ours[group(one.arrival)] += one.found
    for arrival, tokens in best:
        exact[group(arrival)] += tokens
    least = LEAST_FOUND * exact.total()
    return choose(ours[name] / tokens for name, tokens in exact.items() if tokens >= least)


def of_off(cached: Iterable[Served], without: Iterable[Served], share: float, group: Group) -> float:
    """Returns a quantile of the first tokens over that without the cache, of the group that fares worst."""
    groups: tuple[defaultdict[object, list[Served]], ...] = defaultdict(list), defaultdict(list)
    for run, of_group in zip((cached, without), groups, strict=True):
        for one in run:
            of_group[group(one.arrival)].append(one)
    ratios = [
        _first(ones, share) / _first(groups[1][name], share)
        for name, ones in groups[0].items()
        if len(ones) >= LEAST_REQUESTS
    ]
    return max(ratios, default=0.0)


def _first(served: Iterable[Served], share: float) -> float:
    return quantile(sorted(one.first_token for one in served), share)


if __name__ == "__main__":
    sys.exit(main())
