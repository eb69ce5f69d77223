"""Orderings alone: each keeps what it is given, and does what its paper says, faults included."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.fair_queue import FairQueue
from admission.orderings.by_key import EarliestDeadlineFirst, ShortestPredictedFirst
from admission.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from admission.orderings.ordering import ArrivalOrder, Ordering
from admission.orderings.virtual_finish import VirtualFinishWithBoost
from backend.scheduler.sequence import Sequence
from tests.admission.sequences import make_sequence
from tests.examples import examples

ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "fair": lambda: FairQueue(10.0, Aging(1.0)),
    "fcfs": ArrivalOrder,
    "round robin": RequestRoundRobin,
    "shortest first": lambda: ShortestPredictedFirst(size),
    "virtual token counter": lambda: VirtualTokenCounter({"b": 2.0}),
    "virtual finish": lambda: VirtualFinishWithBoost(size, {"b": 2.0}),
    "earliest deadline": lambda: EarliestDeadlineFirst(lambda s: s.arrival + 2.0),
}


def size(sequence: Sequence) -> float:
    return float(len(sequence.prompt) + sequence.max_tokens)


def drain(ordering: Ordering) -> list[str]:
    names = []
    while (head := ordering.head()) is not None:
        names.append(head.id)
        ordering.remove(head)
    return names


@pytest.mark.parametrize("name", ORDERINGS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_every_sequence_is_in_the_queue_until_it_is_removed_wherever_it_stands(name: str, data: st.DataObject) -> None:
    ordering = ORDERINGS[name]()
    waiting: list[Sequence] = []
    admitted: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("arrive", "arrive", "admit", "cancel", "preempt", "charge")))
        if action == "arrive":
            tenant = data.draw(st.sampled_from("abc"))
            waiting.append(make_sequence(str(number), tenant, data.draw(st.integers(1, 9)), arrival=float(number)))
            ordering.add(waiting[-1])
        elif action == "admit" and (head := ordering.head()) is not None:
            ordering.remove(head)
            waiting.remove(head)
            admitted.append(head)
            ordering.prepay(head, size(head))
        elif action == "cancel" and waiting:
            gone = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            ordering.remove(gone)
            ordering.settle(gone)
        elif action == "preempt" and admitted:
            waiting.append(admitted.pop())
            ordering.restore(waiting[-1])
        elif action == "charge" and admitted:
            costs = [data.draw(st.floats(0, 20)) for _ in admitted]
            sums = ordering.charge(admitted, costs)
            assert sum(sums.values()) == pytest.approx(sum(costs))
            ordering.correct([(tenant, -cost / 2) for tenant, cost in sums.items()])
        head = ordering.head()
        assert head is ordering.head()
        assert len(ordering) == len(waiting) and (head in waiting if waiting else head is None)
    assert sorted(drain(ordering)) == sorted(sequence.id for sequence in waiting)


def test_round_robin_gives_every_tenant_a_turn_however_many_requests_it_has() -> None:
    ordering = RequestRoundRobin()
    for number in range(4):
        ordering.add(make_sequence(f"a{number}", "a"))
    ordering.add(make_sequence("b0", "b"))
    ordering.add(make_sequence("c0", "c"))
    assert drain(ordering) == ["a0", "b0", "c0", "a1", "a2", "a3"]


def test_round_robin_passes_no_turn_on_when_a_request_behind_the_first_is_cancelled() -> None:
    ordering = RequestRoundRobin()
    sequences = [make_sequence(f"a{number}", "a") for number in range(3)]
    for sequence in (*sequences, make_sequence("b0", "b")):
        ordering.add(sequence)
    ordering.remove(sequences[1])
    assert drain(ordering) == ["a0", "b0", "a2"]


def test_shortest_first_starves_the_long() -> None:
    ordering = ShortestPredictedFirst(size)
    ordering.add(make_sequence("long", prompt=100))
    for number in range(5):
        ordering.add(make_sequence(f"short{number}", arrival=number + 1.0))
        head = ordering.head()
        assert head is not None and head.id == f"short{number}"
        ordering.remove(head)


def test_a_prediction_is_asked_for_once_and_survives_a_preemption() -> None:
    asked: list[str] = []
    ordering = ShortestPredictedFirst(lambda s: float(asked.append(s.id) or len(asked)))
    first, second = make_sequence("first"), make_sequence("second")
    ordering.add(first)
    ordering.add(second)
    ordering.remove(first)
    ordering.restore(first)
    assert ordering.head() is first and asked == ["first", "second"]


def test_the_counter_of_least_service_goes_first_by_weight() -> None:
    ordering = VirtualTokenCounter({"b": 4.0})
    sequences = [make_sequence(f"{tenant}{number}", tenant) for number in range(2) for tenant in "ab"]
    for sequence in sequences:
        ordering.add(sequence)
    ordering.charge(sequences[:2], [10.0, 20.0])
    head = ordering.head()
    assert head is not None and head.tenant == "b"


def test_a_tenant_that_was_idle_is_lifted_to_those_who_wait() -> None:
    ordering = VirtualTokenCounter()
    busy = make_sequence("busy", "busy")
    ordering.add(busy)
    ordering.charge([busy], [100.0])
    ordering.add(make_sequence("late", "late"))
    assert ordering.counters["late"] == 100.0


def test_a_tenant_that_finds_nobody_waiting_is_lifted_to_whoever_left_last() -> None:
    ordering = VirtualTokenCounter()
    busy = make_sequence("busy", "busy")
    ordering.add(busy)
    ordering.remove(busy)
    ordering.charge([busy], [100.0])
    ordering.add(make_sequence("late", "late"))
    assert ordering.counters["late"] == 100.0


def test_the_boost_turns_the_order_around_after_3_3_times_its_seconds() -> None:
    ordering = VirtualFinishWithBoost(size, boost=0.3, boost_seconds=10.0)
    ordering.add(make_sequence("small", prompt=1))
    ordering.add(make_sequence("large", prompt=50))
    ordering.at(33.0)
    head = ordering.head()
    assert head is not None and head.id == "small"
    ordering.at(34.0)
    head = ordering.head()
    assert head is not None and head.id == "large"


def test_virtual_finish_lets_one_tenant_of_many_small_requests_pass_another() -> None:
    ordering = VirtualFinishWithBoost(size)
    ordering.add(make_sequence("patient", "light", prompt=10))
    for number in range(5):
        ordering.add(make_sequence(f"flood{number}", "heavy", prompt=9))
    assert drain(ordering)[-1] == "patient"


def test_the_earliest_deadline_goes_first_and_the_late_wait_behind_all_others() -> None:
    deadlines = {"soon": 2.0, "later": 9.0, "latest": 12.0}
    ordering = EarliestDeadlineFirst(lambda s: deadlines[s.id])
    for name in ("latest", "later", "soon"):
        ordering.add(make_sequence(name))
    head = ordering.head()
    assert head is not None and head.id == "soon"
    ordering.at(5.0)
    assert drain(ordering) == ["later", "latest", "soon"]
