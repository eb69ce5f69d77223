from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from admission.aging import OVERTAKING, SAVED, Aging
from admission.orderings.tenant_queue import OrderInTenant, TenantQueue
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence
from tests.examples import examples


def queue_of(*sequences: Sequence, aging: Aging | None = None) -> TenantQueue:
    queue = TenantQueue(OrderInTenant(aging or Aging(2.0)))
    for number, sequence in enumerate(sequences):
        queue.add(sequence, number)
    return queue


def drain(queue: TenantQueue, now: float = 0.0) -> list[str]:
    names = []
    while (first := queue.first(now)) is not None:
        names.append(first.id)
        queue.remove(first, now)
    return names


def test_a_higher_class_goes_before_what_came_within_its_window_and_ties_go_by_number() -> None:
    low, urgent = make_sequence("low", arrival=0.0, priority_class=1), make_sequence("urgent", arrival=1.9)
    late, tied = make_sequence("late", arrival=2.1), make_sequence("tied", arrival=2.1)
    assert drain(queue_of(low, late, urgent, tied)) == ["urgent", "low", "late", "tied"]


def test_what_is_removed_is_never_first_and_returns_to_its_place() -> None:
    first, second = make_sequence("first", arrival=1.0), make_sequence("second", arrival=2.0)
    queue = queue_of(first, second)
    assert first in queue
    queue.remove(first, 3.0)
    assert queue.first(3.0) is second
    assert first not in queue
    queue.add(first, 2)
    assert (queue.first_place(3.0), len(queue)) == ((first.due, 2), 2)
    assert drain(queue) == ["first", "second"]
    assert queue.first_place(3.0) is None


SECONDS = 20.0


def by_size(*sequences: Sequence, aging: Aging | None = None) -> TenantQueue:
    """A queue in which the shorter may overtake for 20 s; the target of the first class is 2 s."""
    queue = TenantQueue(OrderInTenant(aging or Aging(2.0), SECONDS))
    for number, sequence in enumerate(sequences):
        queue.add(sequence, number)
    return queue


def test_the_shortest_that_can_be_in_time_goes_first_then_the_shortest_of_the_late() -> None:
    late = [make_sequence(f"late {size}", prompt=size, arrival=0.0) for size in (30, 10)]
    fresh = [make_sequence(f"fresh {size}", prompt=size, arrival=5.0) for size in (40, 20)]
    assert drain(by_size(*late, *fresh), now=5.0) == ["fresh 20", "fresh 40", "late 10", "late 30"]


def test_a_class_with_a_target_of_its_own_is_late_by_that() -> None:
    sooner = make_sequence("sooner", prompt=10, arrival=0.0, first_token_target=1.0)
    other = make_sequence("other", prompt=20, arrival=0.0, first_token_target=4.0)
    assert drain(by_size(sooner, other), now=0.5) == ["sooner", "other"]
    assert drain(by_size(sooner, other), now=1.0) == ["other", "sooner"]


def test_without_seconds_nothing_overtakes_by_its_size() -> None:
    long, short = make_sequence("long", prompt=100), make_sequence("short", arrival=1.0)
    assert drain(queue_of(long, short), now=1.0) == ["long", "short"]


def test_no_size_brings_a_lower_class_before_a_higher_one_that_waits() -> None:
    aged = [make_sequence(f"aged {size}", prompt=size, priority_class=1) for size in (50, 40)]
    urgent = make_sequence("urgent", prompt=90, arrival=3.0)
    short = make_sequence("short", arrival=3.0, priority_class=1)
    queue = by_size(*aged, urgent, short)
    assert drain(queue, now=3.0) == ["aged 50", "aged 40", "urgent", "short"]


def test_what_presses_goes_first_by_when_it_is_due_whatever_its_size() -> None:
    long, short = make_sequence("long", prompt=100), make_sequence("short", arrival=1.0)
    pressing = make_sequence("pressing", prompt=50, arrival=1.0, first_token_by=1.9)
    assert drain(by_size(long, pressing, short), now=1.0) == ["pressing", "short", "long"]


def test_what_was_preempted_goes_on_before_shorter_ones() -> None:
    preempted = make_sequence("preempted", prompt=100, arrival=1.0, num_preemptions=1)
    queue = by_size(make_sequence("older", prompt=60), make_sequence("short", arrival=1.0), preempted)
    assert drain(queue, now=1.0) == ["preempted", "short", "older"]


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_old_sequence_is_overtaken_by_no_more_than_its_bound(seed: int) -> None:
    random, now = Random(seed), 0.0
    aging = Aging(random.choice([0.0, 2.0]))
    queue = TenantQueue(OrderInTenant(aging, 5.0))
    numbers = count()

    def arrive(name: str, size: int) -> Sequence:
        sequence = make_sequence(name, prompt=size, arrival=now, priority_class=random.choice([0, 0, 1]))
        queue.add(sequence, next(numbers))
        return sequence

    for _ in range(random.randint(0, 30)):
        arrive("before", random.randint(1, 20))
    victim = arrive("victim", 20)
    key = victim.arrival + aging.offset(victim.priority_class)
    in_order = out_of_order = 0.0
    while (first := queue.first(now)) is not victim:
        assert first is not None
        queue.remove(first, now)
        if now - key >= 5.0:
            before = first.arrival + aging.offset(first.priority_class) <= key
            in_order, out_of_order = (
                in_order + before * len(first.prompt),
                out_of_order + (not before) * len(first.prompt),
            )
        now += random.uniform(0.0, 0.5)
        for _ in range(random.randint(0, 2)):
            arrive("after", random.randint(1, 20))
    assert out_of_order <= OVERTAKING * in_order + SAVED * 20.0
