"""Every ordering keeps what it is given until it is taken out again."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.orderings.by_key import EarliestDeadlineFirst, ShortestPredictedFirst
from admission.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from admission.orderings.fair_queue import FairQueue
from admission.orderings.ordering import ArrivalOrder, Ordering
from admission.orderings.virtual_finish import VirtualFinishWithBoost
from backend.scheduler.sequence import Sequence
from tests.admission.orderings.queues import drain, size
from tests.backend.sequences import make_sequence
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
