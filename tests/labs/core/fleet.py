"""Replicas on one virtual clock: cores that share debts over one store. Their tenants always have work waiting."""

from collections.abc import Mapping
from itertools import count
from random import Random

from admission.core import CoreConfig, Overload, make_core
from admission.ledger import work_of
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from gateway.tenants.shared_debts import SharedDebts
from labs.benchmarks.max_min import Reach, max_min_shares
from labs.simulation.fairness_monitor import FairnessMonitor
from quotas.store.served_sums import ServedSums
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence
from tests.quotas.paper_sums import PaperSums

COSTS = StepTime((2e-2, 1e-3, 1e-2, 0.0, 0.0, 0.0, 0.0), 64)
ENGINE = EngineConfig(
    num_blocks=64, max_model_len=128, block_size=8, max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=64
)


class Replica(ClockedCore):
    """A replica that begins at zero, under a name of its own."""

    def __init__(
        self, weights: Mapping[str, float], prompts: Mapping[str, int], store: PaperSums, random: Random, now: float
    ) -> None:
        config = CoreConfig(weights=weights, burst_s=1.0, overload=Overload.UNBOUNDED, calibration=False)
        super().__init__(make_core(config, ENGINE, StepTimeModel(COSTS)), self._took, now)
        self.monitor = FairnessMonitor(self.core)
        self.tenants: frozenset[str] = frozenset()
        self._prompts, self._random = prompts, random
        self._waiting: dict[str, set[Sequence]] = {tenant: set() for tenant in weights}
        self._numbers = count()
        self.debts = SharedDebts(
            ServedSums(store, "fleet", lambda: store.now),  # type: ignore[arg-type]
            self.core.share.take_charged,
            lambda served, replicas: self.core.debts_changed(served, replicas, self.now),
            lambda: store.now,
        )

    def reach(self, tenants: frozenset[str]) -> None:
        """These tenants, and no others, have work here from now on."""
        self.tenants = tenants
        for tenant in sorted(self._waiting):
            if tenant in tenants:
                self._add(tenant)
            else:
                for sequence in sorted(self._waiting[tenant], key=lambda one: one.id):
                    self.finish(sequence)
                self._waiting[tenant].clear()

    def run(self, until: float) -> None:
        while self.now < until:
            self.plan()
            if not self.launched:
                self.now = until
                return
            self.complete()
            self.monitor.completed()

    def launch(self, step: ScheduledStep) -> None:
        super().launch(step)
        self.monitor.planned(step.admitted)
        for sequence in step.admitted:
            self._waiting[sequence.tenant].discard(sequence)
            self._add(sequence.tenant)

    def _add(self, tenant: str) -> None:
        """Have more of the tenant wait than one step can admit, unless it has left."""
        while tenant in self.tenants and len(self._waiting[tenant]) <= ENGINE.max_num_seqs:
            prompt, output = self._random.randint(1, self._prompts[tenant]), self._random.randint(1, 3)
            sequence = make_sequence(f"{tenant}{next(self._numbers)}", tenant, prompt, output)
            self._waiting[tenant].add(self.add(sequence))

    def _took(self, step: ScheduledStep) -> float:
        return COSTS.seconds(work_of(step)) * self._random.uniform(0.9, 1.1)


class Fleet:
    """Replicas that come and go; `served` is by tenant, on all that ever were, in seconds of engine time."""

    def __init__(self, weights: Mapping[str, float], prompts: Mapping[str, int], random: Random, shares: bool) -> None:
        self.weights, self._prompts = weights, prompts
        self.replicas: dict[int, Replica] = {}
        self.store, self._random, self._shares = PaperSums(), random, shares
        self._gone: dict[str, float] = dict.fromkeys(weights, 0.0)

    @property
    def served(self) -> dict[str, float]:
        served = dict(self._gone)
        for replica in self.replicas.values():
            for tenant, account in replica.core.share.accounts.items():
                served[tenant] += account.charged
        return served

    @property
    def gap_bound(self) -> float:
        """The largest bound on the gap of one replica alone."""
        return max(replica.monitor.bound for replica in self.replicas.values())

    def reach(self, reach: Reach) -> None:
        """Let tenants have work on these replicas: an unnamed replica dies, and a new one begins at zero."""
        live = frozenset[int]().union(*reach.values())
        for number in self.replicas.keys() - live:
            for tenant, account in self.replicas.pop(number).core.share.accounts.items():
                self._gone[tenant] += account.charged
        for number in sorted(live):
            if number not in self.replicas:
                self.replicas[number] = Replica(self.weights, self._prompts, self.store, self._random, self.store.now)
            self.replicas[number].reach(frozenset(tenant for tenant, where in reach.items() if number in where))

    async def run(self, period: float) -> None:
        """Serve for so long; each replica exchanges once, one after the other."""
        for replica in self.replicas.values():
            self.store.now += period / len(self.replicas)
            for other in self.replicas.values():
                other.run(self.store.now)
            if self._shares:
                await replica.debts.exchange()


async def departure(reach: Reach, seconds: float, period: float, fleet: Fleet) -> float:
    """Have a fleet serve with this reach; returns the largest departure of a tenant from its weighted max-min share, by
    its weight relative to the heaviest's.
    """
    fleet.reach(reach)
    before, weights, began = fleet.served, fleet.weights, fleet.store.now
    shares, heaviest = max_min_shares(reach, weights), max(weights.values())
    passed = largest = 0.0
    while passed < seconds:
        await fleet.run(period)
        passed = fleet.store.now - began
        for tenant, served in fleet.served.items():
            away = abs(served - before[tenant] - shares.get(tenant, 0.0) * passed)
            largest = max(largest, away * heaviest / weights[tenant])
    return largest
