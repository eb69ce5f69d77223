"""The fair queue alone, on a machine that serves one admission at a time from a memory of `slots` sequences."""

import random
from collections import Counter
from math import inf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.orderings.fair_queue import FairQueue, gap_bound
from backend.scheduler.sequence import Sequence
from tests.admission.orderings.queues import head_of
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


def wait(queue: FairQueue, tenant: str, count: int = 1, **fields: Any) -> list[Sequence]:
    """So many sequences of a tenant come."""
    sequences = [make_sequence(f"{tenant}{n}", tenant, **fields) for n in range(count)]
    for sequence in sequences:
        queue.add(sequence)
    return sequences


def admit(queue: FairQueue, cost: float) -> Sequence:
    """The head is admitted, and pays as much in advance."""
    head = head_of(queue)
    queue.remove(head)
    queue.prepay(head, cost)
    return head


def test_rounds_grant_every_waiting_tenant_once_however_often_the_head_is_asked_for() -> None:
    queue = FairQueue(10.0, Aging())
    for tenant in "ab":
        wait(queue, tenant, 4)
    first = head_of(queue)
    for _ in range(1000):
        assert queue.head() is first
    assert queue.round == 1


def test_the_grants_of_a_tenant_that_is_served_one_request_at_a_time_pay_for_its_requests() -> None:
    queue = FairQueue(10.0, Aging())
    wait(queue, "busy", 200)
    wait(queue, "light")
    served = {"busy": 0.0, "light": 0.0}
    for _ in range(100):
        head = admit(queue, 8.0)
        queue.charge([head], [8.0])
        queue.settle(head)
        served[head.tenant] += 8.0
        if head.tenant == "light":
            wait(queue, "light")
    assert served["light"] >= 0.75 * served["busy"], "one request of 8 for each grant of 10, less the first"


def spend(queue: FairQueue, tenant: str, cost: float) -> None:
    """One request of the tenant comes and is admitted."""
    (sequence,) = wait(queue, tenant)
    assert admit(queue, cost) is sequence


def test_a_tenant_comes_back_to_what_is_left_of_the_rounds_grant_and_to_its_debt() -> None:
    queue = FairQueue(10.0, Aging())
    spend(queue, "thrifty", 1.0)
    spend(queue, "lavish", 50.0)
    for name in ("thrifty", "lavish"):
        wait(queue, name)
    assert queue.credit("thrifty") == 9.0
    assert queue.credit("lavish") == -40.0


def test_credit_of_an_earlier_round_is_lost() -> None:
    queue = FairQueue(10.0, Aging())
    spend(queue, "thrifty", 1.0)
    spend(queue, "lavish", 50.0)
    spend(queue, "lavish", 50.0)
    assert queue.round > 2
    wait(queue, "thrifty")
    assert queue.credit("thrifty") == 10.0, "the grant of this round, and nothing of the first"


def test_a_refund_is_no_credit_beyond_a_grant_for_a_tenant_that_comes_back() -> None:
    queue = FairQueue(10.0, Aging())
    wait(queue, "a")
    sequence = admit(queue, 1.0)
    queue.settle(sequence)
    queue.prepaid[sequence] = 100.0
    queue.settle(sequence)
    wait(queue, "a")
    assert queue.credit("a") == 10.0


def test_tenants_with_credit_take_turns_by_admissions() -> None:
    queue = FairQueue(100.0, Aging())
    flood, light = wait(queue, "flood", 3), wait(queue, "light")
    assert [admit(queue, 1.0) for _ in range(4)] == [flood[0], *light, *flood[1:]]
    assert queue.head() is None


def test_a_refund_does_not_keep_a_tenant_at_the_head() -> None:
    queue = FairQueue(10.0, Aging())
    flood = wait(queue, "flood", 4)
    assert [admit(queue, 200.0) for _ in range(2)] == flood[:2]
    (light,) = wait(queue, "light")
    for sequence in flood[:2]:
        queue.settle(sequence)  # all is paid back: none of it was used
    assert queue.credit("flood") > 100.0
    assert light in [admit(queue, 1.0) for _ in range(2)]


def test_credit_is_borrowed_only_to_overtake_a_lower_class() -> None:
    queue = FairQueue(10.0, Aging(), debt_limit=1000.0)
    wait(queue, "flood", 3)
    admit(queue, 500.0)
    wait(queue, "light")
    assert admit(queue, 1.0).tenant == "light", "as urgent, and not in debt"
    wait(queue, "slow", priority_class=1)
    assert head_of(queue).tenant == "flood", "it overtakes on credit"


def test_only_the_ratios_of_weights_matter() -> None:
    credits_ = []
    for scale in (1.0, 4.0):
        queue = FairQueue(10.0, Aging(), {"heavy": 2.0 * scale, "light": 1.0 * scale})
        spend(queue, "heavy", 35.0)
        spend(queue, "light", 12.0)
        wait(queue, "heavy")
        queue.head()
        credits_.append((queue.round, queue.credit("heavy"), queue.credit("light")))
    assert credits_[0] == credits_[1]


def test_cancelled_entries_do_not_pile_up_behind_a_head_that_waits() -> None:
    queue = FairQueue(10.0, Aging())
    wait(queue, "a")
    for _ in range(1000):
        queue.remove(*wait(queue, "a", arrival=1.0))
    assert queue.accounts["a"].waiting.num_entries < 200


def test_all_that_a_tenant_paid_ahead_is_a_part_of_the_bound() -> None:
    """First one tenant's work is slow and the other's done at once, then the other way round."""
    queue, cost, served, slow = FairQueue(1.0, Aging()), 10.0, Counter[str](), list[Sequence]()
    for tenant in "ab":
        wait(queue, tenant, 100)

    def serve(sequence: Sequence) -> None:
        queue.charge([sequence], [cost])
        queue.settle(sequence)
        served[sequence.tenant] += cost

    def admit_forty(fast: str) -> None:
        for _ in range(40):
            head = admit(queue, cost)
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
            tenant = admit(queue, 10).tenant
            served[tenant] += 1
            wait(queue, tenant)

    for tenant in "ab":
        wait(queue, tenant, 3)
    serve(100)
    assert abs(served["a"] - served["b"]) <= 2
    served.update(a=0, b=0)
    queue.policy_changed({"a": 3.0}, Aging())
    serve(400)
    assert abs(served["a"] - 300) <= 4


def served(queue: FairQueue, cost: float = 1.0) -> str:
    """The names of all that wait, in the order of their turns, each at this cost."""
    names = ""
    while (head := queue.head()) is not None:
        assert admit(queue, cost) is head
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


def test_within_the_limit_on_debt_who_is_due_first_goes_first_whose_turn_it_may_be() -> None:
    assert served(queue_of(10.0, *flood())) == "0123x"


def test_beyond_it_the_tenant_that_had_more_waits() -> None:
    assert served(queue_of(1.5, *flood())) == "012x3"
    assert served(queue_of(0.0, *flood())) == "0x123"


class OfTwo:
    """The tenant a asks for more than its share, and all others for less."""

    def is_beyond(self, tenant: str) -> bool:
        return tenant == "a"

    def is_within(self, tenant: str) -> bool:
        return tenant != "a"


def beside_a(*sequences: Sequence) -> FairQueue:
    queue = FairQueue(1.0, Aging(2.0), debt_limit=1.0, deadline_debt_limit=10.0)
    queue.shares = OfTwo()
    for each in sequences:
        queue.add(each)
    return queue


def test_a_tenant_beyond_its_share_overtakes_nobody_without_a_deadline_who_is_within_its_own() -> None:
    *of_a, x = flood()
    assert served(beside_a(*of_a, x)) == "0123x", "deadlines go by when they are due"
    x.first_token_by = None
    assert served(beside_a(*of_a, x)) == "x0123"


def test_a_tenant_within_its_share_owes_nothing_and_waits_for_no_turn() -> None:
    queue = beside_a(*flood()[:4], make_sequence("x", "b", arrival=4.0))
    assert admit(queue, 5.0).id == "x"
    assert queue.credit("b") < 0
    again = make_sequence("again", "b", arrival=9.0)
    queue.add(again)
    assert queue.head() is again
    assert queue.credit("b") >= 0


def test_what_has_no_deadline_is_served_by_turns() -> None:
    assert served(queue_of(10.0, *flood(deadline=None))) == "0x123"


def test_who_is_due_earlier_goes_first_whoever_came_first() -> None:
    patient, calm, urgent = (
        make_sequence("p", "a", arrival=1.0),
        make_sequence("c", "b", arrival=1.0, first_token_by=2.9),
        make_sequence("u", "c", arrival=1.5, first_token_by=2.5),
    )
    assert served(queue_of(10.0, patient, calm, urgent)) == "ucp"


def test_whoever_is_not_pressing_is_overtaken_by_what_is_due_before_it_is_meant_to_begin() -> None:
    patient, early, late = (
        make_sequence("p", "a", arrival=4.0, first_token_target=6.0),
        make_sequence("e", "b", arrival=7.0, first_token_by=9.9),
        make_sequence("l", "b", arrival=7.0, first_token_by=10.1),
    )
    assert served(queue_of(10.0, patient, early, late)) == "epl"


def test_a_held_tenant_is_passed_over_and_comes_back_to_its_place() -> None:
    queue = queue_of(10.0, *flood())
    queue.hold("a", "allowance")
    assert head_of(queue).id == "x"
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


def test_urgent_work_borrows_also_when_it_has_just_become_the_first_of_its_tenant() -> None:
    queue = FairQueue(10.0, Aging(2.0), debt_limit=100.0)
    (first,) = wait(queue, "a", priority_class=1)
    (urgent,) = wait(queue, "a", arrival=3.0)
    wait(queue, "b", priority_class=1)
    assert admit(queue, 50.0) is first
    assert queue.head() is urgent, "its tenant is in debt by less than it may be"
