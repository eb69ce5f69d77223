"""Order of age within the leeway, fairness beyond it."""

from math import inf

from admission.aging import Aging
from admission.lenient_queue import LenientFairQueue
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import Sequence


def sequence(name: str, tenant: str, arrival: float, deadline: float | None = 10.0, age_bonus: float = 0.0) -> Sequence:
    one = Sequence(name, tenant, [0], SamplingParams(), 1, 0, frozenset(), arrival, first_token_by=deadline)
    one.age_bonus = age_bonus
    return one


def served(queue: LenientFairQueue, cost: float = 1.0) -> str:
    """The names of all that wait, in the order of their turns, each at this cost."""
    names = ""
    while (head := queue.head()) is not None:
        assert queue.head() is head
        queue.remove(head)
        queue.prepay(head, cost)
        names += head.id
    return names


def queue_of(leeway: float, *sequences: Sequence, quantum: float = 1.0) -> LenientFairQueue:
    queue = LenientFairQueue(quantum, Aging(2.0), leeway=leeway)
    for each in sequences:
        queue.add(each)
    return queue


def flood(deadline: float | None = 10.0) -> list[Sequence]:
    """Four of one tenant, then one of another."""
    return [*(sequence(str(n), "a", n, deadline) for n in range(4)), sequence("x", "b", 4.0, deadline)]


def test_within_the_leeway_the_oldest_goes_first_whose_turn_it_may_be() -> None:
    assert served(queue_of(10.0, *flood())) == "0123x"


def test_beyond_it_the_tenant_that_had_more_waits() -> None:
    assert served(queue_of(1.5, *flood())) == "012x3"
    assert served(queue_of(0.0, *flood())) == "0x123"


def test_what_has_no_deadline_gets_no_leeway() -> None:
    assert served(queue_of(10.0, *flood(deadline=None))) == "0x123"


def test_a_head_start_counts_as_age() -> None:
    short, long = sequence("s", "a", 1.0), sequence("l", "b", 1.4, age_bonus=0.5)
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
    assert queue.credit_after("a", 0) == queue.credit("a")
    assert queue.credit_after("a", 3) == queue.credit("a") + 3 * (queue.credit_after("a", 1) - queue.credit("a"))
    queue.hold("a", "allowance")
    assert queue.credit_after("a", 100) == -inf


def test_a_timeout_of_minutes_is_no_reason_for_leeway() -> None:
    assert served(queue_of(10.0, *flood(deadline=600.0))) == "0x123"
