"""The departures of tenants from their shares of a fleet of replicas: `python -m labs.benchmarks.fleet_fairness`.

Replicas of Llama-3-8B on an A100 (simulated) with 10,000 tokens of KV memory each, under the core's own settings. The
four tenants of `fairness` have work waiting on every replica that they reach, at all times. Fair are the
weighted max-min shares of the graph of who reaches which replica. A departure is the largest of any tenant, by its
weight, at any time of a run, in multiples of R times the gap of one replica: the most by which the service of two of
them drifts apart on it while all four have work there.

Each replica learns 0.1 s late what the others have served, or 0.5 s late, or never, as if each were alone. Of the fleet
that changes, each replica is left out with a chance of one in five, each third of the time another: a returning
replica begins anew.

What sharing costs is the processor time of an exchange, on both sides of a store on this machine.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from redis import Redis

from admission.controller import Controller
from admission.outcome import AdmissionRefused
from admission.promise import Promise
from admission.share import Share
from backend.scheduler.sequence import FinishReason, SequenceStatus
from backend.scheduler.sequence import Sequence as Waiting
from labs.benchmarks.fairness import MEMORY, TENANTS, FairnessObserver, Tenant
from labs.benchmarks.max_min import Reach, max_min_shares
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.store.redis_store import RedisStore

DEVICE = DEVICES["llama3-8b-a100"]
POLICY = f"order=fair,overload=unbounded,{MEMORY}"
WAITING = 96  # requests of each tenant on each replica, beyond one slice's admissions
SLICE_SECONDS = 0.1  # between two exchanges of a replica
LATE: Mapping[str, int | None] = {"0.1 s late": 1, "0.5 s late": 5, "never": None}  # in slices
NAMES = [tenant.name for tenant in TENANTS]
EQUAL = dict.fromkeys(NAMES, 1.0)
UNEQUAL = dict(zip(NAMES, (4.0, 2.0, 1.0, 1.0), strict=True))
EXCHANGES = 300  # averaged for the cost

Row = dict[str, object]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="simulated")
    options = parser.parse_args(arguments)
    runs, seconds, sizes = (1, 6.0, (4,)) if options.quick else (options.runs, options.seconds, (4, 16))
    report, seeds = Report("fleet_fairness", options.quick), range(1, runs + 1)
    _show_one_of_four(report, seeds[0], seconds)
    for replicas in sizes:
        _show_departures(report, replicas, seeds, seconds)
    _show_costs(report, (10, 100, 1000))
    return report.finish(options.results)


class Observer(FairnessObserver):
    """Counts the arrived requests by tenant."""

    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.arrivals: defaultdict[str, list[Waiting]] = defaultdict(list)

    def arrived(self, sequence: Waiting, answer: Promise | AdmissionRefused, now: float) -> None:
        self.arrivals[sequence.tenant].append(sequence)


class Replica:
    """One core whose tenants always have work waiting."""

    def __init__(self, number: int, seed: int, weights: Mapping[str, float], now: float) -> None:
        told = "+".join(f"{name}:{weight:g}" for name, weight in weights.items())
        simulated = parse_simulated_policy(f"{POLICY},weights={told}", DEVICE)
        self.core = simulated.make_core()
        self.observer = Observer(self.core)
        self._number, self._now, self._random = number, now, Random(f"{seed} {number} {now}")
        self._loop = Loop(self.core, DEVICE, Recorder(DEVICE, Objective(), {}), simulated.engine.max_model_len)
        self._learned: dict[str, float] = {}  # what the others had served when it last asked

    @property
    def served(self) -> dict[str, float]:
        return {name: account.charged for name, account in self.core.share.accounts.items()}

    def advance(self, until: float, reach: Reach) -> None:
        for tenant in TENANTS:
            if self._number not in reach[tenant.name]:
                self._end(tenant.name)
            else:
                waits = self.core.backlog.of(tenant.name).count
                self._loop.expect([self._request(tenant) for _ in range(WAITING - waits)])
        self._now = until
        self._loop.advance(until)

    def learn(self, others: Mapping[str, float], replicas: int) -> None:
        """Learn the others' total service."""
        more = {name: total - self._learned.get(name, total) for name, total in others.items()}
        self._learned = dict(others)
        self.core.debts_changed({name: cost for name, cost in more.items() if cost > 0}, replicas, self._now)

    def _end(self, tenant: str) -> None:
        for sequence in self.observer.arrivals.pop(tenant, ()):
            if sequence.status is not SequenceStatus.FINISHED:
                self.core.finish_sequence(sequence, FinishReason.CANCELLED, self._now)

    def _request(self, tenant: Tenant) -> Arrival:
        prompt, output = (max(1, int(mean * self._random.uniform(0.5, 1.5))) for mean in (tenant.prompt, tenant.output))
        return Arrival(self._now, prompt, output, tenant=tenant.name)


class Fleet:
    """Replicas that learn of each other `late` slices late, or never (None)."""

    def __init__(self, seed: int, weights: Mapping[str, float], late: int | None) -> None:
        self.now = 0.0
        self.replicas: dict[int, Replica] = {}
        self._seed, self._weights, self._late = seed, weights, late
        self._gone: Counter[str] = Counter()  # service of dead replicas
        self._history: deque[tuple[Counter[str], dict[Replica, dict[str, float]]]] = deque(maxlen=late)

    @property
    def served(self) -> Counter[str]:
        served = Counter(self._gone)
        for replica in self.replicas.values():
            served.update(replica.served)
        return served

    def departure(self, reach: Reach, seconds: float) -> float:
        """Serve with this reach; returns the largest departure from the shares, by weight."""
        self._let_live(frozenset[int]().union(*reach.values()))
        shares, before, began, largest = max_min_shares(reach, self._weights), self.served, self.now, 0.0
        heaviest = max(self._weights.values())
        while self.now < began + seconds - SLICE_SECONDS / 2:
            self._slice(reach)
            served = self.served
            for name, share in shares.items():
                away = abs(served[name] - before[name] - share * (self.now - began))
                largest = max(largest, away * heaviest / self._weights[name])
        return largest

    def _let_live(self, live: frozenset[int]) -> None:
        for number in self.replicas.keys() - live:
            self._gone.update(self.replicas.pop(number).served)
        for number in sorted(live - self.replicas.keys()):
            self.replicas[number] = Replica(number, self._seed, self._weights, self.now)

    def _slice(self, reach: Reach) -> None:
        self.now += SLICE_SECONDS
        for replica in self.replicas.values():
            replica.advance(self.now, reach)
        if self._late is None:
            return
        self._history.append((self.served, {replica: replica.served for replica in self.replicas.values()}))
        total, own = self._history[0]
        for replica in self.replicas.values():
            others = Counter(total)
            others.subtract(own.get(replica, {}))
            replica.learn(others, len(self.replicas))


def _show_one_of_four(report: Report, seed: int, seconds: float) -> None:
    near, far = NAMES[1], NAMES[2]
    reach = dict.fromkeys(NAMES, frozenset[int]()) | {near: frozenset([0]), far: frozenset(range(4))}
    rows: list[Row] = []
    for learns, late in LATE.items():
        fleet = Fleet(seed, EQUAL, late)
        fleet.departure(reach, seconds)
        rows.append({"learns of others": learns} | {name: fleet.served[name] / fleet.now for name in (near, far)})
    report.add_table(
        f"{near} on one of four replicas, {far} on all: engine time a second, of which 1 and 3 are fair", rows
    )


def _show_departures(report: Report, replicas: int, seeds: range, seconds: float) -> None:
    for title, weights in (("equal weights", EQUAL), ("weights 4, 2, 1, 1", UNEQUAL)):
        gaps = [_gap(seed, weights, seconds) for seed in seeds]
        found = {
            learns: [_departures(seed, replicas, weights, late, seconds) for seed in seeds]
            for learns, late in LATE.items()
        }
        rows: list[Row] = [
            {
                "learns of others": learns,
                "departure, R gaps": Spread.of(
                    [lasting / replicas / gap for (lasting, _), gap in zip(runs, gaps, strict=True)]
                ),
                "that changes": Spread.of(
                    [changing / replicas / gap for (_, changing), gap in zip(runs, gaps, strict=True)]
                ),
                "departure, s": Spread.of([lasting for lasting, _ in runs]),
                "gap of one, s": Spread.of(gaps),
            }
            for learns, runs in found.items()
        ]
        report.add_table(f"{replicas} replicas, random reach, {title}: largest departures, median (extremes)", rows)
        worst = max(max(run) / gap for run, gap in zip(found["0.5 s late"], gaps, strict=True)) / replicas
        report.at_most(f"{replicas} replicas, {title}: worst departure when 0.5 s late, R gaps", worst, 1.0)


def _gap(seed: int, weights: Mapping[str, float], seconds: float) -> float:
    """Returns the gap of one replica on which all four have work."""
    fleet = Fleet(seed, weights, None)
    fleet.departure(dict.fromkeys(NAMES, frozenset([0])), seconds)
    return fleet.replicas[0].observer.monitor.gap


def _departures(
    seed: int, replicas: int, weights: Mapping[str, float], late: int | None, seconds: float
) -> tuple[float, float]:
    """Return the largest departure of a fleet that lasts, and of a fleet that changes twice."""
    random = Random(seed)
    lasting = Fleet(seed, weights, late).departure(_reach(random, range(replicas)), seconds)
    changing, largest = Fleet(seed, weights, late), 0.0
    for _ in range(3):
        live = [number for number in range(replicas) if random.random() < 0.8]
        largest = max(largest, changing.departure(_reach(random, live), seconds / 3))
    return lasting, largest


def _reach(random: Random, live: Sequence[int]) -> Reach:
    """Draws where tenants have work: everywhere, on a half, on a quarter, and on one."""
    return {name: frozenset(random.sample(live, max(1, len(live) >> part))) for part, name in enumerate(NAMES[:3])} | {
        NAMES[3]: frozenset(random.sample(live, 1))
    }


def _show_costs(report: Report, tenants: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as directory, EmbeddedStore(Path(directory)) as url:
        rows = [asyncio.run(_cost(url, number)) for number in tenants]
    report.add_table("an exchange of two replicas by the number of tenants that each serves, on each side", rows)
    of_ten = float(str(rows[0]["replica, us"]))
    report.at_most(
        "an exchange of ten tenants, share of its replica's processor at ten a second", of_ten * 10 / 1e6, 0.01
    )


async def _cost(url: str, tenants: int) -> Row:
    stores = [RedisStore.at(url, 5.0) for _ in range(2)]
    for store in stores:
        await store.connect()
    fleets = [store.served_sums(f"cost of {tenants}") for store in stores]
    share = Share()
    names = [f"tenant-{number}" for number in range(tenants)]
    for name in names:
        share.opened(share.account(name))
    store_began, began, in_core = _store_seconds(url), time.process_time(), 0.0
    for number in range(1, EXCHANGES + 1):
        for fleet in fleets:
            found = await fleet.exchange(dict.fromkeys(names, number / 100))
            entered = time.process_time()
            for name, seconds in found.served.items():
                share.charge(share.account(name), seconds)
            in_core += time.process_time() - entered
    took, store_took = time.process_time() - began, _store_seconds(url) - store_began
    for store in stores:
        await store.close()
    per = 1e6 / EXCHANGES / len(fleets)
    return {
        "tenants": tenants,
        "replica, us": took * per,
        "of it the core": in_core * per,
        "store, us": store_took * per,
    }


def _store_seconds(url: str) -> float:
    """Returns the processor time that the store has taken."""
    with Redis.from_url(url) as redis:
        cpu = redis.info("cpu")
    return float(cpu["used_cpu_sys"]) + float(cpu["used_cpu_user"])


if __name__ == "__main__":
    sys.exit(main())
