"""Adaptive LIFO, as a baseline: in order while the queue is short-lived, the newest first once it is not."""

from backend.scheduler.sequence import Sequence
from labs.orderings.adaptive_lifo import AdaptiveLifo
from tests.backend.sequences import make_sequence

PATIENCE = 0.5


def queue_of(*arrivals: float) -> tuple[AdaptiveLifo, list[Sequence]]:
    queue, waiting = (
        AdaptiveLifo(PATIENCE),
        [make_sequence(str(n), arrival=arrival) for n, arrival in enumerate(arrivals)],
    )
    for each in waiting:
        queue.add(each)
    return queue, waiting


def served(queue: AdaptiveLifo, now: float) -> list[Sequence]:
    queue.set_time(now)
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        order.append(head)
    return order


def test_a_queue_that_does_not_run_empty_is_served_newest_first() -> None:
    queue, waiting = queue_of(1.0, 1.1, 1.2)
    assert served(queue, 1.1 + PATIENCE) == waiting[::-1]


def test_a_queue_that_has_run_empty_is_served_in_order_again() -> None:
    queue, _ = queue_of(1.0, 1.1)
    assert len(served(queue, 5.0)) == 2
    later = [make_sequence("a", arrival=6.0), make_sequence("b", arrival=6.1)]
    for each in later:
        queue.add(each)
    assert served(queue, 6.2) == later
