"""Urgent work in the whole core: it goes before a long prompt in mid-prefill, and takes a slot at a full batch."""

from collections import deque
from itertools import count

from admission.aging import Aging
from admission.core import CoreConfig, MemoryGate, make_core
from admission.fair_queue import FairQueue
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import Sequence, SequenceStatus
from tests.backend.paper_device import PaperDevice, continuation
from tests.backend.sequences import make_sequence

OPTIMISTIC = CoreConfig(memory=MemoryGate.OPTIMISTIC)
END = 99  # a token that the device on paper never samples


class Bench:
    """A core over a device on paper, one step after the other."""

    def __init__(self, core: CoreConfig = OPTIMISTIC, **changes: object) -> None:
        fields: dict[str, object] = dict(
            num_blocks=64, max_model_len=128, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=16
        )
        self.engine = EngineConfig(**(fields | changes))  # type: ignore[arg-type]
        self.core = make_core(core, self.engine)
        self.scheduler = self.core.scheduler
        self.device = PaperDevice(4)
        self.flying: deque[Batch] = deque()
        self.order: list[Sequence] = []  # in which first tokens came
        self.now = 0.0
        self._names = count()

    def arrive(self, prompt: int, output: int, level: int, tenant: str = "t") -> Sequence:
        n = next(self._names)
        tokens = [n + 10 + i for i in range(prompt)]
        sequence = Sequence(f"s{n}", tenant, tokens, SamplingParams(), output, 0, frozenset([END]))
        sequence.priority_class = level
        self.core.arrive(sequence, self.now)
        return sequence

    def step(self) -> None:
        while (batch := self.core.schedule(self.now)) is not None:
            self.flying.append(batch)
        self.now += 0.01
        new_tokens = self.core.update_from_output(self.device.execute(self.flying.popleft()), self.now)
        self.order += [sequence for sequence, _, _ in new_tokens if len(sequence.output) == 1]
        self.scheduler.check_integrity()

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()


def as_if_alone(sequence: Sequence) -> bool:
    return sequence.output == continuation(sequence.prompt, sequence.max_tokens, END)


def test_a_long_prompt_pauses_in_mid_prefill_for_shorter_urgent_ones_and_loses_nothing() -> None:
    bench = Bench()
    long = bench.arrive(prompt=110, output=4, level=1)
    bench.step()
    urgent = [bench.arrive(prompt=12, output=4, level=0, tenant=tenant) for tenant in "abc"]
    bench.drain()
    assert bench.order == [*urgent, long]
    assert bench.scheduler.counters.recomputed_tokens == bench.scheduler.counters.preemptions == 0
    assert all(map(as_if_alone, [long, *urgent]))


def test_a_long_prompt_of_the_same_class_does_not_pause() -> None:
    bench = Bench()
    long = bench.arrive(prompt=110, output=4, level=0)
    bench.step()
    shorter = bench.arrive(prompt=12, output=4, level=0, tenant="a")
    bench.drain()
    assert bench.order == [long, shorter]


def test_a_long_prompt_in_mid_prefill_gives_its_memory_to_urgent_ones_and_starts_again() -> None:
    bench = Bench(num_blocks=32)
    long = bench.arrive(prompt=110, output=4, level=1)
    for _ in range(4):
        bench.step()
    assert 0 < long.num_computed_tokens < len(long.prompt)
    urgent = [bench.arrive(prompt=40, output=4, level=0, tenant=tenant) for tenant in "ab"]
    bench.drain()
    assert bench.order == [*urgent, long]
    assert long.num_preemptions == 1
    assert bench.scheduler.counters.prompt_tokens == 110 + 2 * 40, "what is computed again is not billed again"
    assert all(map(as_if_alone, [long, *urgent]))


def test_at_a_full_batch_waiting_work_of_a_higher_class_displaces_running_work_of_a_lower_one() -> None:
    bench = Bench()
    lower = [bench.arrive(prompt=4, output=30, level=2, tenant=tenant) for tenant in "abcd"]
    for _ in range(6):
        bench.step()
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in lower)
    urgent = bench.arrive(prompt=4, output=3, level=0)
    for _ in range(4):
        bench.step()
    assert urgent.output, "it did not wait for anyone to end"
    assert sorted(sequence.num_preemptions for sequence in lower) == [0, 0, 0, 1], "one slot, one victim"
    bench.drain()
    assert all(map(as_if_alone, [*lower, urgent]))


def test_the_displaced_is_of_the_lowest_class_and_comes_back_before_those_that_arrived_after_it() -> None:
    bench = Bench()
    middle = [bench.arrive(prompt=4, output=40, level=1, tenant=tenant) for tenant in "abc"]
    lowest = bench.arrive(prompt=4, output=40, level=2, tenant="d")
    for _ in range(4):
        bench.step()
    later = bench.arrive(prompt=4, output=2, level=2, tenant="d")
    urgent = bench.arrive(prompt=4, output=2, level=0, tenant="e")
    while later.status is SequenceStatus.WAITING:
        bench.step()
    assert [sequence.num_preemptions for sequence in middle] == [0, 0, 0]
    assert lowest.num_preemptions == 1 and lowest.status is not SequenceStatus.WAITING
    bench.drain()
    assert all(map(as_if_alone, [*middle, lowest, later, urgent]))


def test_nobody_is_displaced_by_work_of_its_own_class() -> None:
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


def test_urgent_work_borrows_also_when_it_has_just_become_the_first_of_its_tenant() -> None:
    queue = FairQueue(10.0, Aging(2.0), debt_limit=100.0)
    first, urgent = (
        make_sequence("first", "a", arrival=0.0, priority_class=1),
        make_sequence("urgent", "a", arrival=3.0, priority_class=0),
    )
    for sequence in (first, urgent, make_sequence("other", "b", arrival=0.0, priority_class=1)):
        queue.add(sequence)
    assert queue.head() is first
    queue.remove(first)
    queue.prepay(first, 50.0)
    assert queue.head() is urgent, "its tenant is in debt by less than it may be"
