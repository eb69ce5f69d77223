from admission.aging import Aging
from admission.orderings.tenant_queue import OrderInTenant, TenantQueue
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence


def queue_of(*sequences: Sequence, aging: Aging | None = None) -> TenantQueue:
    queue = TenantQueue(OrderInTenant(aging or Aging(2.0)))
    for number, sequence in enumerate(sequences):
        queue.add(sequence, number)
    return queue


def drain(queue: TenantQueue, now: float = 0.0) -> list[str]:
    names = []
    while (first := queue.first(now)) is not None:
        names.append(first.id)
        queue.remove(first)
    return names


def test_a_higher_class_goes_before_what_came_within_its_window_and_ties_go_by_number() -> None:
    low, urgent = make_sequence("low", arrival=0.0, priority_class=1), make_sequence("urgent", arrival=1.9)
    late, tied = make_sequence("late", arrival=2.1), make_sequence("tied", arrival=2.1)
    assert drain(queue_of(low, late, urgent, tied)) == ["urgent", "low", "late", "tied"]


def test_what_is_removed_is_never_first_and_returns_to_its_place() -> None:
    first, second = make_sequence("first", arrival=1.0), make_sequence("second", arrival=2.0)
    queue = queue_of(first, second)
    assert first in queue
    queue.remove(first)
    assert queue.first(3.0) is second
    assert first not in queue
    queue.add(first, 2)
    assert (queue.first_place(3.0), len(queue)) == ((1.0, 2), 2)
    assert drain(queue) == ["first", "second"]
    assert queue.first_place(3.0) is None
