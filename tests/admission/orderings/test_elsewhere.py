from admission.aging import Aging
from admission.orderings.fair_queue import STALE, FairQueue
from admission.orderings.ordering import EnoughForAll
from tests.admission.orderings.queues import head_of
from tests.backend.sequences import make_sequence

GRANT = 1.0  # of the first round
MOST = float(STALE)  # that a tenant of weight 1 owes for one replica, at a quantum of 1 and without limits on debt


def waiting(*tenants: str, weights: dict[str, float] | None = None) -> FairQueue:
    """A queue in which each of these has 100 requests waiting."""
    queue = FairQueue(1.0, Aging(20.0), weights)
    for number in range(100):
        for tenant in tenants:
            queue.add(make_sequence(f"{tenant}{number}", tenant))
    return queue


def serve(queue: FairQueue, count: int, cost: float = 1.0) -> str:
    """Serves so many requests, each of this cost; returns whose they were."""
    served = ""
    for _ in range(count):
        head = head_of(queue)
        queue.remove(head)
        queue.prepay(head, cost)
        queue.charge([head], [cost])
        queue.settle(head)
        served += head.tenant
    return served


def test_who_was_served_elsewhere_waits_for_as_much_to_be_served_here() -> None:
    queue = waiting("a", "b")
    serve(queue, 2)
    queue.served_elsewhere({"b": 5.0}, 2)
    assert serve(queue, 5) == "aaaaa"
    assert sorted(serve(queue, 10)) == sorted("ab" * 5)


def test_by_weight() -> None:
    queue = waiting("a", "b", weights={"a": 1.0, "b": 2.0})
    serve(queue, 6)
    queue.served_elsewhere({"b": 8.0}, 2)
    assert serve(queue, 4) == "aaaa"


def test_what_all_were_served_elsewhere_changes_no_order() -> None:
    queue, other = waiting("a", "b"), waiting("a", "b")
    queue.served_elsewhere({"a": 7.0, "b": 7.0}, 2)
    assert serve(queue, 20) == serve(other, 20)


def test_what_is_owed_is_bounded_by_the_replicas_there_are() -> None:
    queue = waiting("a", "b")
    for _ in range(50):
        queue.served_elsewhere({"b": 5.0}, 3)
    assert queue.credit("b") == GRANT - 3 * MOST
    assert queue.credit("a") == GRANT
    queue.served_elsewhere({"a": 1.0}, 1)
    assert queue.credit("b") == GRANT - MOST, "two are gone: what it had of them counts no more"


def test_a_debt_of_its_own_is_not_forgiven_with_what_is_owed_elsewhere() -> None:
    queue = waiting("a", "b")
    serve(queue, 2, cost=100.0)
    before = queue.credit("b")
    queue.served_elsewhere({"b": 5.0}, 2)
    assert queue.credit("b") == before - 5.0


def test_rounds_pay_what_an_idle_tenant_owes() -> None:
    queue = waiting("a", "c")
    queue.served_elsewhere({"b": 5.0}, 2)
    assert queue.credit("b") == -5.0
    serve(queue, 6)
    queue.served_elsewhere({"a": 1.0}, 2)
    assert -5.0 < queue.credit("b") < -2.0
    serve(queue, 20)
    queue.served_elsewhere({"a": 1.0}, 2)
    assert queue.credit("b") == 0.0, "and nothing is left as credit"


def test_absence_is_no_credit() -> None:
    """c was nowhere while a and b were served on all replicas."""
    queue = waiting("a", "b")
    for _ in range(20):
        serve(queue, 2)
        queue.served_elsewhere({"a": 3.0, "b": 3.0}, 4)
    queue.add(make_sequence("c", "c"))
    queue.add(make_sequence("c2", "c"))
    assert queue.credit("c") <= 1.0, "the grant of one round"
    assert serve(queue, 6).count("c") == 2
    assert max(queue.credit("a"), queue.credit("b")) > -2.0, "and the others owe no more than what they had since"


class Within:
    """Everybody asks for less than its share."""

    def is_beyond(self, tenant: str) -> bool:
        return False

    def is_within(self, tenant: str) -> bool:
        return True


def test_what_is_forgiven_is_not_paid_back() -> None:
    queue = waiting("a")
    queue.served_elsewhere({"b": 5.0}, 2)
    queue.shares = Within()
    late = make_sequence("late", "b")
    queue.add(late)
    assert queue.credit("b") == 1.0, "the grant of one round: it asks for less than its share"
    queue.shares = EnoughForAll()
    queue.remove(late)
    before = queue.credit("b")
    serve(queue, 20)
    queue.served_elsewhere({"a": 1.0}, 2)
    assert queue.credit("b") == before


def test_where_nobody_waits_nobody_owes() -> None:
    queue = waiting("a")
    serve(queue, 100)
    queue.served_elsewhere({"a": 9.0, "b": 3.0}, 2)
    assert queue.credit("b") == 0.0


def test_what_was_charged_is_taken_once() -> None:
    queue = waiting("a", "b")
    serve(queue, 3, cost=2.0)
    assert queue.take_charged() == {"a": 4.0, "b": 2.0}
    assert queue.take_charged() == {}
    queue.correct([("b", 0.5)])
    queue.served_elsewhere({"a": 9.0}, 2)
    assert queue.take_charged() == {"b": 2.5}, "what others have served is theirs to tell"
