"""Tenants flood the machine with their highest class: the lowest class waits no longer than was computed for it."""

from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging, Inflow
from admission.core import CoreConfig, Unit, make_core
from admission.ledger import work_of
from admission.orderings.fair_queue import FairQueue
from backend.config import EngineConfig
from backend.scheduler.batch import StepOutput
from backend.scheduler.sequence import TARGET, Sequence, SequenceStatus
from labs.simulation.fairness_monitor import FairnessMonitor
from tests.admission.staged_core import TRUE
from tests.backend.sequences import make_sequence
from tests.examples import examples

ENGINE = EngineConfig(
    num_blocks=60,
    max_model_len=64,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    prefill_chunk=16,
    max_preemptions=1,
)
CAPACITY = 2000.0  # tokens by weight that this engine serves a second, about, with the step times of `TRUE`
LOWEST = 2


@dataclass
class Bucket:
    """Lets work arrive as an `Inflow` promises."""

    inflow: Inflow
    level: float

    def refill(self, seconds: float) -> None:
        self.level = min(self.inflow.burst, self.level + self.inflow.rate * seconds)

    def take(self, cost: float) -> bool:
        if cost > self.level:
            return False
        self.level -= cost
        return True


@dataclass
class Wait:
    """Of one sequence of the lowest class, until it was first admitted."""

    sequence: Sequence
    ahead: float  # what its tenant had running, or waiting before it
    served: float  # to all, when it arrived
    seconds: float | None = None  # until its first admission; None: it waits still


class Flood:
    """A core charged in tokens. Classes 0 and 1 of every tenant arrive as fast as their buckets let them."""

    def __init__(
        self, seed: int, weights: dict[str, float], inflows: dict[int, Inflow], aging: Aging, overtaking: float = 0.0
    ) -> None:
        self.random, self.overtaking = Random(seed), overtaking
        self.weights, self.inflows, self.aging = weights, inflows, aging
        config = CoreConfig(
            unit=Unit.TOKENS,
            quantum=32,
            debt_limit=0,
            weights=weights,
            seconds_per_class=aging.seconds_per_class,
            max_waiting=1_000_000,
            overtaking_seconds=overtaking,
        )
        self.core = make_core(config, ENGINE)
        queue = self.core.scheduler.waiting
        assert isinstance(queue, FairQueue)
        self.monitor = FairnessMonitor(queue, config.quantum, max(config.debt_limit, config.deadline_debt_limit))
        self.buckets = {(t, level): Bucket(inflow, inflow.burst) for t in weights for level, inflow in inflows.items()}
        self.now = 0.0
        self.lowest = 0.05  # arrivals of the lowest class at each step
        self.served = 0.0
        self.waits: dict[Sequence, Wait] = {}
        self.live: list[Sequence] = []
        self._names = count()

    def run(self, seconds: float) -> list[tuple[float, float]]:
        """A flood that lasts as long as this, and the time until the last of the lowest class was admitted.

        Returns the seconds that each of them waited, and its bound.
        """
        while self.now < seconds or any(wait.seconds is None for wait in self.waits.values()):
            if self.now < seconds:
                self._arrivals()
            self._step()
        return [(wait.seconds or 0.0, self.bound(wait)) for wait in self.waits.values()]

    def bound(self, wait: Wait) -> float:
        """What `Aging` computes for it, with the service that the machine gave meanwhile as its rate."""
        tenant = wait.sequence.tenant
        weight, total = self.weights[tenant], sum(self.weights.values())
        heaviest = max([*self.weights.values(), 1.0])
        lag = weight / heaviest * self.monitor.bound
        rate = wait.served / wait.seconds if wait.seconds else inf
        largest = 30 + 2 * 20 + ENGINE.max_preemptions * 50
        return self.aging.worst_wait(
            LOWEST, wait.ahead, self.inflows, weight / total, rate, lag, self.overtaking, largest
        )

    def _arrivals(self) -> None:
        for (tenant, level), bucket in self.buckets.items():
            sequence = self._make(tenant, level)
            while bucket.take(most_cost(sequence)):
                self._arrive(sequence)
                sequence = self._make(tenant, level)
        if self.random.random() < self.lowest:
            self._arrive_lowest(self.random.choice(list(self.weights)))

    def _arrive_lowest(self, tenant: str) -> None:
        sequence = self._make(tenant, LOWEST)
        offset = self.aging.offset
        key = self.now + offset(LOWEST)
        own = (s for s in self.live if s.tenant == tenant and s.status is not SequenceStatus.FINISHED)
        before = (
            s for s in own if s.status is not SequenceStatus.WAITING or s.arrival + offset(s.priority_class) <= key
        )
        self.waits[sequence] = Wait(sequence, sum(map(most_cost, before)), self.served)
        self._arrive(sequence)

    def _arrive(self, sequence: Sequence) -> None:
        self.core.arrive(sequence, self.now)
        self.live.append(sequence)

    def _make(self, tenant: str, level: int) -> Sequence:
        prompt, output = self.random.randint(1, 30), self.random.randint(1, 20)
        return make_sequence(str(next(self._names)), tenant, prompt, output, priority_class=level)

    def _step(self) -> None:
        batch = self.core.schedule(self.now)
        if batch is None:
            assert not self.core.scheduler.has_work
            self._pass(0.01)
            return
        scheduled = self.core.scheduler.in_flight[-1]
        self.monitor.planned(scheduled.admitted)
        for sequence in scheduled.admitted:
            wait = self.waits.get(sequence)
            if wait and wait.seconds is None:
                wait.seconds, wait.served = self.now - sequence.arrival, self.served - wait.served
        elapsed = TRUE.seconds(work_of(scheduled))
        self.served += len(scheduled.sampled) * 2.0 + sum(batch.lengths[batch.num_decodes :])
        self.core.update_from_output(StepOutput(batch.step, [0] * len(scheduled.sampled), elapsed), self.now + elapsed)
        self.monitor.completed()
        self.live = [s for s in self.live if s.status is not SequenceStatus.FINISHED]
        self._pass(elapsed)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for bucket in self.buckets.values():
            bucket.refill(seconds)


def most_cost(sequence: Sequence) -> float:
    """In tokens by weight, with all it may ever have to compute again."""
    again = ENGINE.max_preemptions * sequence.most_tokens
    return len(sequence.prompt) + 2 * sequence.max_tokens + again


@pytest.mark.parametrize("seed", range(8))
def test_the_lowest_class_is_admitted_within_its_computed_wait(seed: int) -> None:
    random = Random(seed)
    weights = {f"t{n}": random.choice([1.0, 2.0]) for n in range(random.randint(2, 4))}
    inflows = {level: Inflow(random.choice([150.0, 600.0]), random.choice([1.0, 2.0]) * CAPACITY) for level in (0, 1)}
    flood = Flood(seed, weights, inflows, Aging(random.choice([0.1, 0.5])))
    waits = flood.run(3.0)
    assert any(seconds > 0.2 * bound for seconds, bound in waits), "a flood delays"
    assert all(seconds <= bound for seconds, bound in waits if seconds)


@pytest.mark.parametrize("seed", range(4))
def test_shorter_ones_make_nobody_wait_for_longer_than_was_computed(seed: int) -> None:
    """Those of the lowest class wait for the higher ones and for shorter ones of their own."""
    random = Random(seed)
    weights = {f"t{n}": random.choice([1.0, 2.0]) for n in range(random.randint(1, 3))}
    inflows = {0: Inflow(150.0, 0.3 * CAPACITY), 1: Inflow(150.0, 0.3 * CAPACITY)}
    flood = Flood(seed, weights, inflows, Aging(random.choice([0.01, 0.2])), random.choice([0.1, 0.3]))
    flood.lowest = 0.6  # more than there is capacity for
    waits = flood.run(2.0)
    assert any(seconds > 0.1 * bound for seconds, bound in waits), "a flood delays"
    assert all(seconds <= bound for seconds, bound in waits if seconds)


def test_a_flood_at_four_times_the_capacity_overtakes_for_as_long_as_its_window_and_not_for_ever() -> None:
    inflows = {0: Inflow(300.0, 4 * CAPACITY)}
    waits, strict = (Flood(1, {"flooding": 1.0, "light": 1.0}, inflows, Aging(a)).run(3.0) for a in (0.1, 1e6))
    assert waits[0][0] < 3.0 < strict[0][0], "without aging the first of the lowest class waits for the end"


@settings(max_examples=examples(100, at_night=2000), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    seconds_per_class=st.sampled_from([0.0, 1.0, 5.0]),
    burst=st.floats(1, 50),
    rate=st.floats(0, 10),
    pressing=st.sampled_from([(), (LOWEST,), (0, 1, LOWEST, LOWEST + 1)]),
    victim_class=st.sampled_from([0, LOWEST]),
)
def test_no_more_work_overtakes_than_the_window_lets_in(
    seed: int, seconds_per_class: float, burst: float, rate: float, pressing: tuple[int, ...], victim_class: int
) -> None:
    """Of higher classes, and of pressing work of any."""
    random, aging = Random(seed), Aging(seconds_per_class)
    inflows, in_a_hurry = ({level: Inflow(burst, rate) for level in levels} for levels in ((0, 1), pressing))
    kinds = [(level, None) for level in inflows] + [(level, random.choice([0.1, 2.0, 9.0])) for level in in_a_hurry]
    buckets = {kind: Bucket(Inflow(burst, rate), burst) for kind in kinds}
    queue, now = FairQueue(1.0, aging), 0.0
    victim = make_sequence("victim", "t", priority_class=victim_class)
    queue.add(victim)
    for n in range(200):
        seconds = random.uniform(0, 0.2)
        now += seconds
        for (level, deadline), bucket in buckets.items():
            bucket.refill(seconds)
            if bucket.take(1.0):
                by = None if deadline is None else now + deadline
                name = f"s{n}.{level}.{deadline}"
                queue.add(make_sequence(name, "t", arrival=now, priority_class=level, first_token_by=by))
    overtaking = 0.0
    while (head := queue.head()) is not victim:
        assert head is not None
        queue.remove(head)
        overtaking += 1.0
    assert overtaking <= aging.most_overtaking(victim_class, inflows, in_a_hurry) + 1e-9


def test_pressing_work_overtakes_for_as_long_as_it_is_due_earlier() -> None:
    aging, queue = Aging(20.0), FairQueue(1.0, Aging(20.0))
    window = aging.overtaking_window(1, 1, by_due_in=0.5)
    assert window == TARGET - 0.5 == aging.overtaking_window(1, 1, 5.0, 0.5) - 3.0
    patient = make_sequence("patient", "t", priority_class=1)
    queue.add(patient)
    for arrival in (window + 0.1, window - 0.1):
        queue.add(make_sequence(str(arrival), "t", arrival=arrival, priority_class=1, first_token_by=arrival + 0.5))
    served = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        served.append(head.id)
    assert served == [str(window - 0.1), "patient", str(window + 0.1)]


def test_classes_may_be_unevenly_apart() -> None:
    aging = Aging(2.0, (0.0, 1.0, 10.0))
    assert [aging.offset(level) for level in range(5)] == [0.0, 1.0, 10.0, 12.0, 14.0]
    assert aging.overtaking_window(2, 1) == 9.0
    with pytest.raises(ValueError, match="offsets"):
        Aging(2.0, (0.0, 5.0, 1.0))
