"""The fair queue alone, on a machine that serves one admission at a time from a memory of `slots` sequences."""

import random
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.fair_queue import FairQueue, gap_bound
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence
from tests.examples import examples

PROMPT, OUTPUT = 1.0, 2.0  # what a token costs (VTC's weights)


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


@settings(max_examples=examples(300), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tenants=st.integers(2, 5),
    quantum=st.sampled_from([1.0, 7.0, 60.0, 500.0]),
    memory=st.integers(60, 400),
    predicted=st.sampled_from([0.0, 1.0, 2.0, 5.0]),
    debt_limit=st.sampled_from([0.0, 30.0]),
)
def test_the_service_of_backlogged_tenants_stays_within_the_bound(
    seed: int, tenants: int, quantum: float, memory: int, predicted: float, debt_limit: float
) -> None:
    rng = random.Random(seed)
    names = [f"t{n}" for n in range(tenants)]
    weights = {name: rng.choice([1.0, 2.0, 0.5]) for name in names}
    queue = FairQueue(quantum, Aging(1.0), weights, debt_limit)
    machine = Machine(queue, memory)
    sizes = {name: (rng.randint(1, 30), rng.randint(1, 30)) for name in names}
    for n in range(60 * tenants):
        name = rng.choice(names)
        prompt, output = (rng.randint(1, size) for size in sizes[name])
        queue.add(make_sequence(f"s{n}", name, prompt, output, priority_class=rng.randint(0, 1)))
    largest = 30 * PROMPT + 30 * max(predicted, OUTPUT)
    in_memory = memory * OUTPUT
    while all(queue.accounts[name].num_waiting for name in names):
        machine.step(predicted)
        shares = [machine.served[name] / weights[name] for name in names]
        lightest = min(weights.values())
        bound = 3 * quantum + 2 * (largest + in_memory) / lightest + debt_limit / lightest
        assert max(shares) - min(shares) <= bound


def test_rounds_grant_every_waiting_tenant_once_however_often_the_head_is_asked_for() -> None:
    queue = FairQueue(10.0, Aging())
    for n in range(4):
        queue.add(make_sequence(f"a{n}", "a"))
        queue.add(make_sequence(f"b{n}", "b"))
    first = queue.head()
    assert first is not None
    for _ in range(1000):
        assert queue.head() is first
    assert queue.round == 1


def test_the_grants_of_a_tenant_that_is_served_one_request_at_a_time_pay_for_its_requests() -> None:
    queue = FairQueue(10.0, Aging())
    for n in range(200):
        queue.add(make_sequence(f"busy{n}", "busy"))
    served = {"busy": 0.0, "light": 0.0}
    queue.add(make_sequence("light0", "light"))
    for n in range(100):
        head = queue.head()
        assert head is not None
        queue.remove(head)
        queue.prepay(head, 8.0)
        queue.charge([head], [8.0])
        queue.settle(head)
        served[head.tenant] += 8.0
        if head.tenant == "light":
            queue.add(make_sequence(f"light{n + 1}", "light"))
    assert served["light"] >= 0.75 * served["busy"], "one request of 8 for each grant of 10, less the first"


def spend(queue: FairQueue, tenant: str, cost: float) -> None:
    """One request of the tenant comes and is admitted."""
    sequence = make_sequence(f"{tenant} {cost}", tenant)
    queue.add(sequence)
    assert queue.head() is sequence
    queue.remove(sequence)
    queue.prepay(sequence, cost)


def test_a_tenant_comes_back_to_what_is_left_of_the_rounds_grant_and_to_its_debt() -> None:
    queue = FairQueue(10.0, Aging())
    spend(queue, "thrifty", 1.0)
    spend(queue, "lavish", 50.0)
    for name in ("thrifty", "lavish"):
        queue.add(make_sequence(f"{name} again", name))
    assert queue.credit("thrifty") == 9.0
    assert queue.credit("lavish") == -40.0


def test_credit_of_an_earlier_round_is_lost() -> None:
    queue = FairQueue(10.0, Aging())
    spend(queue, "thrifty", 1.0)
    spend(queue, "lavish", 50.0)
    spend(queue, "lavish", 50.0)
    assert queue.round > 2
    queue.add(make_sequence("again", "thrifty"))
    assert queue.credit("thrifty") == 10.0, "the grant of this round, and nothing of the first"


def test_a_refund_is_no_credit_beyond_a_grant_for_a_tenant_that_comes_back() -> None:
    queue = FairQueue(10.0, Aging())
    sequence = make_sequence("long", "a")
    queue.add(sequence)
    queue.remove(sequence)
    queue.prepay(sequence, 1.0)
    queue.settle(sequence)
    queue.prepaid[sequence] = 100.0
    queue.settle(sequence)
    queue.add(make_sequence("again", "a"))
    assert queue.credit("a") == 10.0


def test_tenants_with_credit_take_turns_by_admissions() -> None:
    queue = FairQueue(100.0, Aging())
    for n in range(3):
        queue.add(make_sequence(f"flood {n}", "flood"))
    queue.add(make_sequence("light", "light"))
    admitted = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        queue.prepay(head, 1.0)
        admitted.append(head.id)
    assert admitted == ["flood 0", "light", "flood 1", "flood 2"]


def test_a_refund_does_not_keep_a_tenant_at_the_head() -> None:
    queue = FairQueue(10.0, Aging())
    flood = [make_sequence(f"flood {n}", "flood") for n in range(4)]
    for sequence in flood:
        queue.add(sequence)
    for sequence in flood[:2]:
        assert queue.head() is sequence
        queue.remove(sequence)
        queue.prepay(sequence, 200.0)
    light = make_sequence("light", "light")
    queue.add(light)
    for sequence in flood[:2]:
        queue.settle(sequence)  # all is paid back: none of it was used
    assert queue.credit("flood") > 100.0
    admitted = []
    for _ in range(2):
        head = queue.head()
        assert head is not None
        queue.remove(head)
        queue.prepay(head, 1.0)
        admitted.append(head)
    assert light in admitted


def test_credit_is_borrowed_only_to_overtake_a_lower_class() -> None:
    queue = FairQueue(10.0, Aging(), debt_limit=1000.0)
    for n in range(3):
        queue.add(make_sequence(f"flood {n}", "flood"))
    first = queue.head()
    assert first is not None
    queue.remove(first)
    queue.prepay(first, 500.0)
    queue.add(make_sequence("equal", "light"))
    head = queue.head()
    assert head is not None and head.tenant == "light", "as urgent, and not in debt"
    queue.remove(head)
    queue.prepay(head, 1.0)
    queue.add(make_sequence("lower", "slow", priority_class=1))
    head = queue.head()
    assert head is not None and head.tenant == "flood", "it overtakes on credit"


def test_only_the_ratios_of_weights_matter() -> None:
    credits_ = []
    for scale in (1.0, 4.0):
        queue = FairQueue(10.0, Aging(), {"heavy": 2.0 * scale, "light": 1.0 * scale})
        spend(queue, "heavy", 35.0)
        spend(queue, "light", 12.0)
        queue.add(make_sequence("again", "heavy"))
        queue.head()
        credits_.append((queue.round, queue.credit("heavy"), queue.credit("light")))
    assert credits_[0] == credits_[1]


def test_cancelled_entries_do_not_pile_up_behind_a_head_that_waits() -> None:
    queue = FairQueue(10.0, Aging())
    queue.add(make_sequence("head", "a"))
    for n in range(1000):
        cancelled = make_sequence(f"s{n}", "a", arrival=1.0)
        queue.add(cancelled)
        queue.remove(cancelled)
    assert len(queue.accounts["a"].waiting) < 100


def test_all_that_a_tenant_paid_ahead_is_a_part_of_the_bound() -> None:
    """First one tenant's work is slow and the other's done at once, then the other way round."""
    queue, cost, served, slow = FairQueue(1.0, Aging()), 10.0, Counter[str](), list[Sequence]()
    for n in range(100):
        queue.add(make_sequence(f"a{n}", "a"))
        queue.add(make_sequence(f"b{n}", "b"))

    def serve(sequence: Sequence) -> None:
        queue.charge([sequence], [cost])
        queue.settle(sequence)
        served[sequence.tenant] += cost

    def admit_forty(fast: str) -> None:
        for _ in range(40):
            head = queue.head()
            assert head is not None
            queue.remove(head)
            queue.prepay(head, cost)
            if head.tenant == fast:
                serve(head)
            else:
                slow.append(head)

    admit_forty(fast="b")
    before = served["a"] - served["b"]
    for sequence in slow:
        serve(sequence)
    admit_forty(fast="a")
    gap = served["a"] - served["b"] - before
    assert gap == 40 * cost, "twice what twenty requests paid ahead, and not what one did"
    assert gap <= gap_bound(1.0, (1.0, 1.0), ahead=20 * cost, run_up=0.0)


def test_a_change_of_weights_holds_from_now_on() -> None:
    queue = FairQueue(10, Aging(), {"a": 1.0, "b": 1.0})
    served = {"a": 0, "b": 0}

    def serve(times: int) -> None:
        for _ in range(times):
            sequence = queue.head()
            assert sequence is not None
            served[sequence.tenant] += 1
            queue.remove(sequence)
            queue.prepay(sequence, 10)
            queue.add(make_sequence(f"{sequence.id}.", sequence.tenant))

    for tenant in "ab":
        for n in range(3):
            queue.add(make_sequence(f"{tenant}{n}", tenant))
    serve(100)
    assert abs(served["a"] - served["b"]) <= 2
    served.update(a=0, b=0)
    queue.policy_changed({"a": 3.0}, Aging())
    serve(400)
    assert abs(served["a"] - 300) <= 4


def test_classes_may_be_unevenly_apart() -> None:
    aging = Aging(2.0, (0.0, 1.0, 10.0))
    assert [aging.offset(level) for level in range(5)] == [0.0, 1.0, 10.0, 12.0, 14.0]
    assert aging.overtaking_window(2, 1) == 9.0
    with pytest.raises(ValueError, match="offsets"):
        Aging(2.0, (0.0, 5.0, 1.0))


def served(queue: FairQueue, cost: float = 1.0) -> str:
    """The names of all that wait, in the order of their turns, each at this cost."""
    names = ""
    while (head := queue.head()) is not None:
        assert queue.head() is head
        queue.remove(head)
        queue.prepay(head, cost)
        names += head.id
    return names


def queue_of(limit: float, *sequences: Sequence, quantum: float = 1.0) -> FairQueue:
    queue = FairQueue(quantum, Aging(2.0), deadline_debt_limit=limit)
    for each in sequences:
        queue.add(each)
    return queue


def flood(deadline: float | None = 10.0) -> list[Sequence]:
    """Four of one tenant, then one of another."""
    of_a = [make_sequence(str(n), "a", arrival=n, first_token_by=deadline) for n in range(4)]
    return [*of_a, make_sequence("x", "b", arrival=4.0, first_token_by=deadline)]


def test_within_the_limit_on_debt_the_oldest_goes_first_whose_turn_it_may_be() -> None:
    assert served(queue_of(10.0, *flood())) == "0123x"


def test_beyond_it_the_tenant_that_had_more_waits() -> None:
    assert served(queue_of(1.5, *flood())) == "012x3"
    assert served(queue_of(0.0, *flood())) == "0x123"


def test_what_has_no_deadline_is_served_by_turns() -> None:
    assert served(queue_of(10.0, *flood(deadline=None))) == "0x123"


def test_an_age_bonus_counts_as_age() -> None:
    short, long = (
        make_sequence("s", "a", arrival=1.0, first_token_by=10.0),
        make_sequence("l", "b", arrival=1.4, first_token_by=10.0),
    )
    long.age_bonus = 0.5
    assert served(queue_of(10.0, short, long)) == "ls"


def test_a_held_tenant_is_passed_over_and_comes_back_to_its_place() -> None:
    queue = queue_of(10.0, *flood())
    queue.hold("a", "allowance")
    head = queue.head()
    assert head is not None and head.id == "x"
    queue.hold("a", None)
    assert served(queue) == "0123x"


def test_a_newcomer_of_a_tenant_in_debt_has_to_wait_for_more_rounds() -> None:
    queue = queue_of(1.5, *flood())
    assert queue.rounds_before("c", 0.0) == 0
    assert queue.rounds_before("a", 3.0) > queue.rounds_before("a", 0.0)


def test_credit_grows_by_a_grant_a_round_and_a_held_tenant_has_none() -> None:
    queue = queue_of(1.5, *flood())
    assert queue.credits_after(["a"], 0) == [queue.credit("a")]
    (after_one,), (after_three,) = queue.credits_after(["a"], 1), queue.credits_after(["a"], 3)
    assert after_three == queue.credit("a") + 3 * (after_one - queue.credit("a"))
    queue.hold("a", "allowance")
    assert queue.credits_after(["a"], 100) == [-inf]


def test_a_timeout_of_minutes_does_not_put_anyone_in_the_order_of_age() -> None:
    assert served(queue_of(10.0, *flood(deadline=600.0))) == "0x123"
