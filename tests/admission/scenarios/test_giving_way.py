"""Whoever gave its memory or its slot to others: when it is back, and to whom it gives way once more."""

from itertools import product
from random import Random

import pytest

from admission.core import CoreConfig, MemoryGate, Order
from backend.scheduler.sequence import FinishReason, SequenceStatus
from tests.admission.scenarios.test_urgency import Bench, as_if_alone

FCFS = CoreConfig(order=Order.FCFS, memory=MemoryGate.OPTIMISTIC)


@pytest.mark.parametrize("order", Order)
def test_whom_others_gave_way_to_goes_before_them_where_the_queue_has_them_first_again(order: Order) -> None:
    bench = Bench(CoreConfig(order=order, memory=MemoryGate.OPTIMISTIC), max_num_seqs=2)
    patient = [bench.arrive(prompt=4, output=30, level=2, tenant=tenant) for tenant in "ab"]
    for _ in range(6):
        bench.step()
    urgent = bench.arrive(prompt=4, output=10, level=0, tenant="u")
    while urgent.status is not SequenceStatus.FINISHED:
        bench.step()
    assert sorted(sequence.num_preemptions for sequence in patient) == [0, 1]
    bench.drain()
    assert all(map(as_if_alone, [*patient, urgent]))


def test_more_urgent_work_goes_before_whom_others_gave_way_to_in_vain() -> None:
    bench = Bench(num_blocks=16, max_model_len=64, max_num_seqs=4)
    stays = bench.arrive(prompt=30, output=20, level=1, tenant="a")
    gives_way = bench.arrive(prompt=4, output=30, level=2, tenant="b")
    while not gives_way.output:
        bench.step()
    large = bench.arrive(prompt=40, output=4, level=1, tenant="c")
    while not gives_way.num_preemptions:
        bench.step()
    urgent = bench.arrive(prompt=4, output=4, level=0, tenant="u")
    bench.drain()
    assert bench.order == [stays, gives_way, urgent, large]


def displaced_by(tenant: str) -> tuple[int, list[SequenceStatus]]:
    """A batch of one, whose sequence gave way to the first of five urgent requests and is back: how often it gives way
    in the next eight steps, and what became of the five by then.
    """
    bench = Bench(FCFS, max_num_seqs=1)
    patient = bench.arrive(prompt=4, output=30, level=2, tenant="a")
    for _ in range(4):
        bench.step()
    urgent = [bench.arrive(prompt=4, output=2, level=0, tenant=tenant) for _ in range(5)]
    while patient.num_preemptions == 0 or patient.status is not SequenceStatus.RUNNING:
        bench.step()
    for _ in range(8):
        bench.step()
    found = patient.num_preemptions - 1, [sequence.status for sequence in urgent]
    bench.drain()
    assert all(map(as_if_alone, [patient, *urgent]))
    return found


def test_whoever_is_back_before_its_own_tenants_work_stays_and_gives_way_to_others() -> None:
    assert displaced_by("a") == (0, [SequenceStatus.WAITING] * 5), "first come, first served within a tenant"
    more, statuses = displaced_by("u")
    assert more > 0 and statuses.count(SequenceStatus.FINISHED) > 1


def test_within_a_tenant_whoever_gave_way_is_back_in_its_place() -> None:
    """What has aged goes before urgent work of its own tenant, for which it had to leave its slot."""
    bench = Bench(max_num_seqs=1)
    patient = bench.arrive(prompt=4, output=30, level=2, tenant="a")
    for _ in range(4):
        bench.step()
    bench.now += 60
    urgent = bench.arrive(prompt=4, output=2, level=0, tenant="a")
    bench.drain()
    assert patient.num_preemptions == 1
    assert bench.order == [patient, urgent]
    assert all(map(as_if_alone, [patient, urgent]))


def test_what_a_lower_class_may_still_need_of_memory_keeps_no_urgent_work_waiting() -> None:
    bench = Bench(CoreConfig(memory=MemoryGate.FORECAST), num_blocks=32)
    lower = bench.arrive(prompt=4, output=110, level=2, tenant="a")
    bench.step()
    alike = bench.arrive(prompt=4, output=110, level=2, tenant="b")
    for _ in range(4):
        bench.step()
    assert alike.status is SequenceStatus.WAITING
    urgent = bench.arrive(prompt=4, output=110, level=0, tenant="c")
    for _ in range(4):
        bench.step()
    assert urgent.output and lower.status is SequenceStatus.RUNNING
    bench.drain()
    assert lower.num_preemptions == 1 and urgent.num_preemptions == 0
    assert all(map(as_if_alone, [lower, alike, urgent]))


@pytest.mark.parametrize(("order", "seed"), list(product((Order.FAIR, Order.FCFS), range(4))))
def test_whoever_lost_its_memory_is_back_when_all_can_get_further_so_that_everyone_comes_to_an_end(
    order: Order, seed: int
) -> None:
    random = Random(seed)
    bench = Bench(
        CoreConfig(order=order, memory=MemoryGate.OPTIMISTIC), num_blocks=64, max_model_len=256, max_num_seqs=16
    )
    arrived = [bench.arrive(random.randint(2, 20), random.randint(50, 230), 1, tenant) for tenant in "abcd" * 10]
    bench.drain()
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in arrived)
    assert bench.scheduler.counters.preemptions > len(arrived) / 2, "memory was short"
    assert all(map(as_if_alone, arrived))
