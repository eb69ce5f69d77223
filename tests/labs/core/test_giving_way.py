"""Urgent work takes memory and slots of what is less urgent; who gave way comes back, and gives way again to some."""

from collections.abc import Collection
from itertools import count
from random import Random

import pytest

from admission.core import ORDERS, CoreConfig, MemoryGate, make_core
from backend.config import EngineConfig
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from tests.admission.clocked_core import ClockedCore
from tests.backend.paper_device import PaperDevice, continuation
from tests.backend.sequences import make_sequence

OPTIMISTIC = CoreConfig(memory=MemoryGate.OPTIMISTIC)
FCFS = CoreConfig(order="fcfs", memory=MemoryGate.OPTIMISTIC)
END = 99  # a token that the device on paper never samples


class Bench(ClockedCore):
    """A core over a device on paper, whose steps take a hundredth of a second."""

    def __init__(self, core: CoreConfig = OPTIMISTIC, **changes: object) -> None:
        fields: dict[str, object] = dict(
            num_blocks=64, max_model_len=128, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=16
        )
        super().__init__(make_core(core, EngineConfig(**(fields | changes))), lambda step: 0.01)  # type: ignore[arg-type]
        self.device = PaperDevice(4)
        self.order: list[Sequence] = []  # in which first tokens came
        self._names = count()

    def arrive(self, prompt: int, output: int, level: int, tenant: str = "t") -> Sequence:
        n = next(self._names)
        tokens = [n + 10 + i for i in range(prompt)]
        return self.add(make_sequence(f"s{n}", tenant, tokens, output, [END], priority_class=level))

    def complete(self, ended: Collection[str] = ()) -> None:
        step = self.launched.popleft()
        self.now += self._seconds(step)
        new_tokens = self.core.update_from_output(self.device.execute(step.batch), self.now)
        self.order += [sequence for sequence, _, _ in new_tokens if len(sequence.output) == 1]
        self.scheduler.check_integrity()


def as_if_alone(sequence: Sequence) -> bool:
    return sequence.output == continuation(sequence.request.prompt, sequence.request.max_tokens, END)


def test_a_long_prompt_pauses_in_mid_prefill_for_shorter_urgent_ones_and_loses_nothing() -> None:
    bench = Bench()
    long = bench.arrive(prompt=110, output=4, level=1)
    bench.step()
    urgent = [bench.arrive(prompt=12, output=4, level=0, tenant=tenant) for tenant in "abc"]
    bench.drain()
    assert bench.order == [*urgent, long]
    assert bench.scheduler.counters.recomputed_tokens == bench.scheduler.counters.preemptions == 0
    assert all(map(as_if_alone, [long, *urgent]))


@pytest.mark.parametrize("length", [110, 12])
def test_a_prompt_that_has_begun_goes_before_what_comes_later_and_is_as_urgent_however_short(length: int) -> None:
    bench = Bench()
    long = bench.arrive(prompt=110, output=4, level=0)
    bench.step()
    other = bench.arrive(prompt=length, output=4, level=0, tenant="a")
    bench.drain()
    assert bench.order == [long, other]


def test_a_long_prompt_in_mid_prefill_gives_its_memory_to_urgent_ones_and_starts_again() -> None:
    bench = Bench(num_blocks=32)
    long = bench.arrive(prompt=110, output=4, level=1)
    bench.steps(4)
    assert 0 < long.num_computed_tokens < long.num_prompt_tokens
    urgent = [bench.arrive(prompt=40, output=4, level=0, tenant=tenant) for tenant in "ab"]
    bench.drain()
    assert bench.order == [*urgent, long]
    assert long.num_preemptions == 1
    assert bench.scheduler.counters.prompt_tokens == 110 + 2 * 40, "what is computed again is not billed again"
    assert all(map(as_if_alone, [long, *urgent]))


def test_at_a_full_batch_waiting_work_of_a_higher_class_displaces_running_work_of_a_lower_one() -> None:
    bench = Bench()
    lower = [bench.arrive(prompt=4, output=30, level=2, tenant=tenant) for tenant in "abcd"]
    bench.steps(6)
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in lower)
    urgent = bench.arrive(prompt=4, output=3, level=0)
    bench.steps(4)
    assert urgent.output, "it did not wait for anyone to end"
    assert sorted(sequence.num_preemptions for sequence in lower) == [0, 0, 0, 1], "one slot, one victim"
    bench.drain()
    assert all(map(as_if_alone, [*lower, urgent]))


def test_the_displaced_is_of_the_lowest_class_and_returns_before_later_arrivals() -> None:
    bench = Bench()
    middle = [bench.arrive(prompt=4, output=40, level=1, tenant=tenant) for tenant in "abc"]
    lowest = bench.arrive(prompt=4, output=40, level=2, tenant="d")
    bench.steps(4)
    later = bench.arrive(prompt=4, output=2, level=2, tenant="d")
    urgent = bench.arrive(prompt=4, output=2, level=0, tenant="e")
    while later.status is SequenceStatus.WAITING:
        bench.step()
    assert [sequence.num_preemptions for sequence in middle] == [0, 0, 0]
    assert lowest.num_preemptions == 1 and lowest.status is not SequenceStatus.WAITING
    bench.drain()
    assert all(map(as_if_alone, [*middle, lowest, later, urgent]))


def test_no_request_is_displaced_by_work_of_its_own_class() -> None:
    bench = Bench()
    for tenant in "abcde":
        bench.arrive(prompt=4, output=30, level=0, tenant=tenant)
    bench.drain()
    assert bench.scheduler.counters.preemptions == 0


def test_a_stream_of_urgent_work_displaces_one_sequence_no_more_often_than_agreed() -> None:
    bench = Bench(max_num_seqs=1, max_preemptions=2)
    patient = bench.arrive(prompt=4, output=30, level=2)
    urgent = []
    while patient.status is not SequenceStatus.FINISHED:
        if patient.status is SequenceStatus.RUNNING and len(urgent) < 10:
            urgent.append(bench.arrive(prompt=4, output=1, level=0, tenant="u"))
        bench.step()
    assert patient.num_preemptions == 2
    bench.drain()
    assert all(map(as_if_alone, [patient, *urgent]))


@pytest.mark.parametrize("order", ORDERS)
def test_whom_others_gave_way_to_goes_before_them_where_the_queue_has_them_first_again(order: str) -> None:
    bench = Bench(CoreConfig(order=order, memory=MemoryGate.OPTIMISTIC), max_num_seqs=2)
    patient = [bench.arrive(prompt=4, output=30, level=2, tenant=tenant) for tenant in "ab"]
    bench.steps(6)
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
    bench.steps(4)
    urgent = [bench.arrive(prompt=4, output=2, level=0, tenant=tenant) for _ in range(5)]
    while patient.num_preemptions == 0 or patient.status is not SequenceStatus.RUNNING:
        bench.step()
    bench.steps(8)
    found = patient.num_preemptions - 1, [sequence.status for sequence in urgent]
    bench.drain()
    assert all(map(as_if_alone, [patient, *urgent]))
    return found


def test_a_victim_that_resumed_before_its_own_tenants_work_stays_and_gives_way_to_others() -> None:
    assert displaced_by("a") == (0, [SequenceStatus.WAITING] * 5), "first come, first served within a tenant"
    more, statuses = displaced_by("u")
    assert more > 0 and statuses.count(SequenceStatus.FINISHED) > 1


def test_within_a_tenant_a_victim_is_back_in_its_place() -> None:
    """What has aged goes before urgent work of its own tenant, for which it had to leave its slot."""
    bench = Bench(max_num_seqs=1)
    patient = bench.arrive(prompt=4, output=30, level=2, tenant="a")
    bench.steps(4)
    bench.now += 60
    urgent = bench.arrive(prompt=4, output=2, level=0, tenant="a")
    bench.drain()
    assert patient.num_preemptions == 1
    assert bench.order == [patient, urgent]
    assert all(map(as_if_alone, [patient, urgent]))


def test_memory_reserved_for_a_lower_class_keeps_no_urgent_request_waiting() -> None:
    bench = Bench(CoreConfig(memory=MemoryGate.FORECAST), num_blocks=32)
    bench.arrive(prompt=4, output=110, level=2, tenant="a")
    bench.drain()  # so that it is known how long such answers are
    lower = bench.arrive(prompt=4, output=110, level=2, tenant="a")
    bench.step()
    alike = bench.arrive(prompt=4, output=110, level=2, tenant="b")
    bench.steps(4)
    assert alike.status is SequenceStatus.WAITING
    urgent = bench.arrive(prompt=4, output=110, level=0, tenant="c")
    bench.steps(4)
    assert urgent.output and lower.status is SequenceStatus.RUNNING
    bench.drain()
    assert lower.num_preemptions == 1 and urgent.num_preemptions == 0
    assert all(map(as_if_alone, [lower, alike, urgent]))


@pytest.mark.parametrize("order", ["fair", "fcfs"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))])
def test_a_victim_is_back_when_all_can_get_further_so_that_every_sequence_ends(order: str, seed: int) -> None:
    random = Random(seed)
    bench = Bench(
        CoreConfig(order=order, memory=MemoryGate.OPTIMISTIC), num_blocks=64, max_model_len=256, max_num_seqs=16
    )
    arrived = [bench.arrive(random.randint(2, 20), random.randint(50, 230), 1, tenant) for tenant in "abcd" * 4]
    bench.drain()
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in arrived)
    assert bench.scheduler.counters.preemptions > len(arrived) / 2, "memory was short"
    assert all(map(as_if_alone, arrived))
