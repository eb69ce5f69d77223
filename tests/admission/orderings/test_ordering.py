"""Every ordering keeps what it is given until it is taken out again."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import Aging
from admission.orderings.adaptive_lifo import AdaptiveLifo
from admission.orderings.by_key import EarliestDeadlineFirst, ShortestPredictedFirst
from admission.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from admission.orderings.fair_queue import FairQueue
from admission.orderings.learned_rank import LearnedRank
from admission.orderings.least_laxity import LeastLaxityFirst
from admission.orderings.length_groups import LengthGroups
from admission.orderings.magnus import Magnus
from admission.orderings.ordering import ArrivalOrder, ListedOrdering, Ordering
from admission.orderings.response_ratio import HighestResponseRatioNext
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
    "learned rank": lambda: LearnedRank(size, 3),
    "length groups": LengthGroups,
    "least laxity": lambda: LeastLaxityFirst(lambda s: s.arrival + 2.0, size),
    "response ratio": lambda: HighestResponseRatioNext(size),
    "magnus": lambda: Magnus(size, size, 60, 4),
}


LISTED: dict[str, Callable[[], ListedOrdering]] = {
    "fcfs": ArrivalOrder,
    "round robin": RequestRoundRobin,
    "shortest first": lambda: ShortestPredictedFirst(size),
    "virtual token counter": lambda: VirtualTokenCounter({"b": 2.0}, size),
    "virtual finish": lambda: VirtualFinishWithBoost(size, {"b": 2.0}),
    "earliest deadline": lambda: EarliestDeadlineFirst(lambda s: s.arrival + len(s.prompt)),
    "adaptive lifo": lambda: AdaptiveLifo(5.0),
    "learned rank": lambda: LearnedRank(size, 40),
    "length groups": LengthGroups,
    "least laxity": lambda: LeastLaxityFirst(lambda s: s.arrival + 9.0, size),
    "response ratio": lambda: HighestResponseRatioNext(size),
    "magnus": lambda: Magnus(size, size, 60, 4),
}
TAKES_ALL_PLACES = {"shortest first", "learned rank"}  # of those behind a newcomer, none is looked after


@pytest.mark.parametrize("name", LISTED)
@settings(max_examples=examples(50, at_night=1000), deadline=None)
@given(data=st.data())
def test_what_is_listed_around_a_newcomer_is_the_order_in_which_all_are_served(name: str, data: st.DataObject) -> None:
    ordering, admitted, now = LISTED[name](), list[Sequence](), 0.0

    def admit() -> Sequence | None:
        if (head := ordering.head()) is None:
            ordering.at(now)  # some serve one batch in a plan
            head = ordering.head()
        if head is not None:
            ordering.remove(head)
            ordering.charge([head], [size(head)])
        return head

    def arriving(number: int) -> Sequence:
        prompt = data.draw(st.integers(1, 9))
        return make_sequence(str(number), data.draw(st.sampled_from("abc")), prompt, 3, arrival=float(number))

    count = data.draw(st.integers(0, 20))
    for number in range(count):
        action = data.draw(st.sampled_from(("arrive", "arrive", "arrive", "admit", "preempt")))
        ordering.at(now := float(number))
        if action == "arrive":
            ordering.add(arriving(number))
        elif action == "preempt" and admitted:
            ordering.restore(admitted.pop())
        elif (head := admit()) is not None:
            admitted.append(head)
    newcomer = arriving(count)
    before, behind = ordering.around(newcomer)
    assert ordering.around(newcomer) == (before, behind), "and asking changes nothing"
    ordering.at(now := float(count))
    ordering.add(newcomer)
    served = list(iter(admit, None))
    assert before == served[: served.index(newcomer)]
    assert behind == ([] if name in TAKES_ALL_PLACES else served[served.index(newcomer) + 1 :])


@pytest.mark.parametrize("name", ORDERINGS)
@settings(max_examples=examples(30, at_night=600), deadline=None)
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
        ordering.at(float(number))
        head = ordering.head()
        assert head is ordering.head()
        assert len(ordering) == len(waiting) and (head in waiting if waiting else head is None)
    assert sorted(drain(ordering)) == sorted(sequence.id for sequence in waiting)
