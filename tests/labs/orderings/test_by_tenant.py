import pytest

from admission.share import Share
from labs.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from tests.backend.sequences import make_sequence
from tests.labs.orderings.queues import drain, head_of, size


def test_round_robin_gives_every_tenant_a_turn_however_many_requests_it_has() -> None:
    ordering = RequestRoundRobin()
    for number in range(4):
        ordering.add(make_sequence(f"a{number}", "a"))
    ordering.add(make_sequence("b0", "b"))
    ordering.add(make_sequence("c0", "c"))
    assert drain(ordering) == ["a0", "b0", "c0", "a1", "a2", "a3"]


def test_the_counter_of_least_service_goes_first_by_weight() -> None:
    share = Share({"b": 4.0})
    ordering = VirtualTokenCounter(share, size)
    sequences = [make_sequence(f"{tenant}{number}", tenant) for number in range(2) for tenant in "ab"]
    for sequence in sequences:
        ordering.add(sequence)
    share.charge(share.account("a"), 10.0)
    share.charge(share.account("b"), 20.0)
    assert head_of(ordering).tenant == "b"


@pytest.mark.parametrize("leaves", [False, True], ids=["still waits", "left last"])
def test_an_idle_tenant_is_lifted_to_the_least_waiting_or_the_last_to_leave(leaves: bool) -> None:
    share = Share()
    ordering = VirtualTokenCounter(share, size)
    busy = make_sequence("busy", "busy")
    ordering.add(busy)
    if leaves:
        ordering.remove(busy)
    share.charge(share.account("busy"), 100.0)
    ordering.add(make_sequence("late", "late"))
    assert ordering.counter("late") == 100.0
