"""The fair queue alone, on a machine that serves one admission at a time from a memory of `slots` sequences."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.fair_queue import FairQueue
from backend.sampling import SamplingParams
from backend.sequence import Sequence

PROMPT, OUTPUT = 1.0, 2.0  # what a token costs (VTC's weights)


def make(name: str, tenant: str, prompt: int = 1, output: int = 1, arrival: float = 0.0, level: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=output)
    sequence = Sequence(name, tenant, [0] * prompt, sampling, output, 0, frozenset(), arrival)
    sequence.priority_class = level
    return sequence


class Machine:
    """Admits in the queue's order while memory lasts, and decodes a token of everything that runs each step."""

    def __init__(self, queue: FairQueue, memory: int) -> None:
        self.queue = queue
        self.memory = memory  # tokens
        self.running: dict[Sequence, int] = {}
        self.served: Counter[str] = Counter()

    def step(self, predicted: float = 0.0) -> None:
        used = sum(len(s.prompt) + s.max_tokens for s in self.running)
        while (head := self.queue.head()) is not None:
            if used + len(head.prompt) + head.max_tokens > self.memory:
                break
            used += len(head.prompt) + head.max_tokens
            self.queue.remove(head)
            self.queue.prepay(head, predicted * head.max_tokens)
            self._charge(head, PROMPT * len(head.prompt))
            self.running[head] = 0
        for sequence in list(self.running):
            self.running[sequence] += 1
            self._charge(sequence, OUTPUT)
            if self.running[sequence] == sequence.max_tokens:
                del self.running[sequence]
                self.queue.settle(sequence)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        self.queue.charge([sequence], [cost])
        self.served[sequence.tenant] += cost


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tenants=st.integers(2, 5),
    quantum=st.sampled_from([1.0, 7.0, 60.0, 500.0]),
    memory=st.integers(60, 400),
    predicted=st.sampled_from([0.0, 1.0, 2.0, 5.0]),
    borrow=st.sampled_from([0.0, 30.0]),
)
def test_the_service_of_backlogged_tenants_stays_within_the_bound(
    seed: int, tenants: int, quantum: float, memory: int, predicted: float, borrow: float
) -> None:
    rng = random.Random(seed)
    names = [f"t{n}" for n in range(tenants)]
    weights = {name: rng.choice([1.0, 2.0, 0.5]) for name in names}
    queue = FairQueue(quantum, Aging(1.0), weights, borrow)
    machine = Machine(queue, memory)
    sizes = {name: (rng.randint(1, 30), rng.randint(1, 30)) for name in names}
    for n in range(60 * tenants):
        name = rng.choice(names)
        prompt, output = (rng.randint(1, size) for size in sizes[name])
        queue.add(make(f"s{n}", name, prompt, output, level=rng.randint(0, 1)))
    largest = 30 * PROMPT + 30 * max(predicted, OUTPUT)
    in_memory = memory * OUTPUT
    while all(queue.accounts[name].num_waiting for name in names):
        machine.step(predicted)
        shares = [machine.served[name] / weights[name] for name in names]
        lightest = min(weights.values())
        bound = 3 * quantum + 2 * (largest + in_memory) / lightest + borrow / lightest
        assert max(shares) - min(shares) <= bound


def test_rounds_grant_every_waiting_tenant_once_however_often_the_head_is_asked_for() -> None:
    queue = FairQueue(10.0, Aging())
    for n in range(4):
        queue.add(make(f"a{n}", "a"))
        queue.add(make(f"b{n}", "b"))
    first = queue.head()
    assert first is not None
    for _ in range(1000):
        assert queue.head() is first
    assert queue.round == 1


def test_the_grants_of_a_tenant_that_is_served_one_request_at_a_time_pay_for_its_requests() -> None:
    queue = FairQueue(10.0, Aging())
    for n in range(200):
        queue.add(make(f"busy{n}", "busy"))
    served = {"busy": 0.0, "light": 0.0}
    queue.add(make("light0", "light"))
    for n in range(100):
        head = queue.head()
        assert head is not None
        queue.remove(head)
        queue.prepay(head, 8.0)
        queue.charge([head], [8.0])
        queue.settle(head)
        served[head.tenant] += 8.0
        if head.tenant == "light":
            queue.add(make(f"light{n + 1}", "light"))
    assert served["light"] >= 0.75 * served["busy"], "one request of 8 for each grant of 10, less the first"


def test_credit_is_lost_when_a_tenant_comes_back_and_debt_is_not() -> None:
    queue = FairQueue(10.0, Aging())
    for name, cost in (("thrifty", 1.0), ("lavish", 50.0)):
        sequence = make(name, name)
        queue.add(sequence)
        while queue.head() is not sequence:
            pass
        queue.remove(sequence)
        queue.prepay(sequence, cost)
        queue.add(make(f"{name} again", name))
    assert queue.standing("thrifty") == 0.0
    assert queue.standing("lavish") == -40.0
