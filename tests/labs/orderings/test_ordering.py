"""Every ordering keeps what it is given until it is taken out again, and foresees in which order it serves."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.forecast import WorkAhead
from admission.keyed_order import KeyedOrder
from admission.order import WaitingOrder
from admission.share import Share
from backend.scheduler.sequence import Sequence
from labs.orderings.adaptive_lifo import AdaptiveLifo
from labs.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from labs.orderings.learned_rank import LearnedRank
from labs.orderings.length_groups import LengthGroups
from labs.orderings.magnus import Magnus
from labs.orderings.ordering import Ordering, PublishedOrder
from labs.orderings.response_ratio import HighestResponseRatioNext
from labs.orderings.shortest_first import ShortestFirst
from labs.orderings.virtual_finish import VirtualFinishWithBoost
from tests.backend.sequences import make_sequence
from tests.examples import examples
from tests.labs.orderings.queues import drain, size

ORDERINGS: dict[str, Callable[[Share], Ordering]] = {
    "round robin": lambda share: RequestRoundRobin(),
    "shortest first": lambda share: ShortestFirst(size),
    "virtual token counter": lambda share: VirtualTokenCounter(share, size),
    "virtual finish": lambda share: VirtualFinishWithBoost(share, size),
    "adaptive lifo": lambda share: AdaptiveLifo(5.0),
    "learned rank": lambda share: LearnedRank(size, 40),
    "length groups": lambda share: LengthGroups(),
    "response ratio": lambda share: HighestResponseRatioNext(size),
    "magnus": lambda share: Magnus(size, size, 60, 4),
}
TAKES_ALL_PLACES = {"shortest first", "learned rank"}  # what is behind a newcomer may be made late
WEIGHTS = {"b": 2.0}


def uncached(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens


def orders(share: Share) -> dict[str, Callable[[], WaitingOrder]]:
    published = {name: lambda make=make: PublishedOrder(make(share), uncached) for name, make in ORDERINGS.items()}
    return published | {"by key": lambda: KeyedOrder(lambda one: one.arrival + one.num_prompt_tokens, uncached)}


@pytest.mark.parametrize("name", orders(Share()))
@settings(max_examples=examples(20, at_night=1000), deadline=None)
@given(data=st.data())
def test_the_line_around_a_newcomer_is_the_order_in_which_all_are_served(name: str, data: st.DataObject) -> None:
    share = Share(WEIGHTS)
    order, admitted, now = orders(share)[name](), list[Sequence](), 0.0

    def admit() -> Sequence | None:
        if (head := order.head()) is None:
            order.set_time(now)  # some serve one batch in a plan
            head = order.head()
        if head is not None:
            order.remove(head)
            share.charge(share.account(head.tenant), size(head))
        return head

    def arriving(number: int) -> Sequence:
        prompt = data.draw(st.integers(1, 9))
        return make_sequence(str(number), data.draw(st.sampled_from("abc")), prompt, 3, arrival=float(number))

    count = data.draw(st.integers(0, 20))
    for number in range(count):
        action = data.draw(st.sampled_from(("arrive", "arrive", "arrive", "admit", "preempt")))
        order.set_time(now := float(number))
        if action == "arrive":
            order.add(arriving(number))
        elif action == "preempt" and admitted:
            order.restore(admitted.pop())
        elif (head := admit()) is not None:
            admitted.append(head)
    newcomer = arriving(count)
    due = order.due(newcomer)
    ahead, behind = order.ahead(newcomer, due), [one for _, _, one, _ in order.behind(newcomer, due)]
    assert order.ahead(newcomer, due) == ahead, "and asking changes nothing"
    order.set_time(now := float(count))
    order.add(newcomer)
    served = list(iter(admit, None))
    before, after = served[: served.index(newcomer)], served[served.index(newcomer) + 1 :]
    own = [one for one in before if one.tenant == newcomer.tenant]
    assert ahead == WorkAhead(
        sum(one.num_prompt_tokens for one in before), len(before), sum(one.num_prompt_tokens for one in own)
    )
    assert behind == ([] if name in TAKES_ALL_PLACES else after)


@pytest.mark.parametrize("name", orders(Share()))
@settings(max_examples=examples(15, at_night=600), deadline=None)
@given(data=st.data())
def test_every_sequence_is_in_the_queue_until_it_is_removed_wherever_it_stands(name: str, data: st.DataObject) -> None:
    share = Share(WEIGHTS)
    order = orders(share)[name]()
    waiting, admitted = list[Sequence](), list[Sequence]()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("arrive", "arrive", "admit", "cancel", "preempt", "charge")))
        if action == "arrive":
            tenant = data.draw(st.sampled_from("abc"))
            waiting.append(make_sequence(str(number), tenant, data.draw(st.integers(1, 9)), arrival=float(number)))
            order.add(waiting[-1])
        elif action == "admit" and (head := order.head()) is not None:
            order.remove(head)
            waiting.remove(head)
            admitted.append(head)
        elif action == "cancel" and waiting:
            gone = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            order.remove(gone)
            order.ended(gone)
        elif action == "preempt" and admitted:
            waiting.append(admitted.pop())
            order.restore(waiting[-1])
        elif action == "charge":
            for sequence in admitted:
                share.charge(share.account(sequence.tenant), data.draw(st.floats(0, 20)))
        order.set_time(float(number))
        head = order.head()
        assert head is order.head()
        assert len(order) == len(waiting) and (head in waiting if waiting else head is None)
    assert sorted(drain(order)) == sorted(sequence.id for sequence in waiting)


@pytest.mark.parametrize("name", orders(Share()))
def test_a_tenant_on_hold_is_offered_nothing_delays_no_other_and_keeps_its_place(name: str) -> None:
    order = orders(Share())[name]()
    order.add(make_sequence("held", "held"))
    order.hold("held", "its limit")
    order.add(make_sequence("later", "other", arrival=1.0))
    head = order.head()
    assert head is not None and head.id == "later" and len(order) == 2
    newcomer = make_sequence("new", "new", prompt=9, arrival=2.0)
    assert order.ahead(newcomer, order.due(newcomer)).requests == 1
    order.remove(head)
    assert order.head() is None
    order.set_time(2.0)
    assert order.head() is None
    order.hold("held", None)
    assert drain(order, 3.0) == ["held"]
