"""The trap of deficit round robin for a server that learns costs late: a blocked head is paid for being looked at.

Four tenants with more work than the machine can do, Llama-3-8B with 10,000 tokens of KV memory (`fairness`).
While the head of the queue waits for memory, what its tenant runs already drives its deficit below 0; a queue that then
refills the deficit of whom it looks at pays that tenant again and again, and nobody else.
"""

from collections import abc, deque
from collections.abc import Iterable, Mapping

import pytest

from admission import core
from admission.orderings.by_tenant import TenantQueues
from admission.orderings.fair_queue import gap_bound
from admission.orderings.ordering import Indifferent
from backend.scheduler.sequence import Sequence
from labs.benchmarks.fairness import DEVICE, MEMORY, arrivals
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder

QUANTUM = 512.0
POLICY = f"order=fair,quantum={QUANTUM:g},debt_limit=0,unit=tokens,{MEMORY}"
SECONDS = 90.0
BOUND = gap_bound(QUANTUM, (1.0, 1.0), ahead=0.0, run_up=2.0 * 10_000)
"""What fits the memory costs at most 2 a token, and each of these is paid ahead or run up."""


class NaiveRefill(Indifferent):
    """Deficit round robin, paid after the fact, that refills a deficit whenever it finds it used up."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._deficits: dict[str, float] = {}
        self._queues = TenantQueues()
        self._ring: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, sequence: Sequence) -> None:
        if sequence.tenant not in self._queues.active:
            self._ring.append(sequence.tenant)
        self._queues.add(sequence)

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        if sequence.tenant not in self._queues.active:
            self._ring.remove(sequence.tenant)

    def head(self) -> Sequence | None:
        while self._ring:
            tenant = self._ring[0]
            if self._deficits.get(tenant, 0.0) <= 0:
                self._deficits[tenant] = self._deficits.get(tenant, 0.0) + self._quantum
            if self._deficits[tenant] > 0:
                return self._queues.first_of(tenant)
            self._ring.rotate(-1)
        return None

    def charge(self, sequences: abc.Sequence[Sequence], costs: abc.Sequence[float]) -> Mapping[str, float]:
        sums = super().charge(sequences, costs)
        self.correct(sums.items())
        return sums

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        for tenant, cost in costs:
            self._deficits[tenant] = self._deficits.get(tenant, 0.0) - cost


def service_gap() -> float:
    """In tokens by weight, the largest between any two tenants."""
    policy, recorder = parse_simulated_policy(POLICY, DEVICE), Recorder(DEVICE, Objective(), {})
    loop = Loop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len)
    loop.run(arrivals(1, SECONDS), SECONDS)
    return recorder.gap_tokens.largest


def test_a_blocked_head_earns_nothing_by_waiting() -> None:
    assert service_gap() <= BOUND


def test_refilling_whatever_is_used_up_pays_a_blocked_head_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core._ORDERINGS, core.Order.FAIR, lambda config, predicted, engine: NaiveRefill(config.quantum))
    assert service_gap() > 2 * BOUND
