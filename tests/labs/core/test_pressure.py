"""Trouble inside the machine, on a virtual clock: no memory for a step, a step that stalls. Classes decide who pays."""

from collections import abc
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from admission.controller import Controller
from admission.core import PRIOR_STEP_TIME, CoreConfig, make_core
from admission.step_times.step_time import StepTimeModel, StepWork
from backend.config import EngineConfig
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES, Device
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import AttemptOutcome, Objective, PlannedWork, Recorder
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=400, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=64, prefill_chunk=64)
STEP = 0.02


class Machine(ClockedCore):
    """A device that has memory for steps of at most `capacity` tokens."""

    def __init__(self) -> None:
        super().__init__(make_core(CoreConfig(), ENGINE), lambda step: STEP)
        self.capacity = 10_000
        self.lost = 0

    def arrive(self, name: str, level: int, prompt: int = 8, output: int = 200) -> Sequence:
        return self.add(make_sequence(name, f"tenant-{level}", prompt, output, priority_class=level))

    def complete(self, ended: Collection[str] = ()) -> None:
        if sum(self.launched[0].batch.lengths) <= self.capacity:
            super().complete(ended)
        else:
            self.lost += 1
            assert self.lose()


def ran(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.RUNNING


def test_without_memory_for_all_the_lowest_class_makes_room() -> None:
    machine = Machine()
    groups = [[machine.arrive(f"{level}-{n}", level) for n in range(8)] for level in (2, 0, 1)]
    machine.steps(10)
    assert all(ran(sequence) for group in groups for sequence in group)
    machine.capacity = 15
    low, high, middle = groups
    while not machine.lost:
        machine.step()
    assert [sum(map(ran, group)) for group in (high, middle, low)] == [8, 4, 0]
    assert machine.core.backlog.of_class(2).count == 8, "they wait, and keep their places"
    machine.steps(40)
    assert all(map(ran, high))
    assert all(sequence.num_preemptions == 0 for group in groups for sequence in group), "it is not held against them"


def test_the_highest_class_is_prefilled_first_in_what_is_left_of_a_step() -> None:
    machine = Machine()
    machine.capacity = 16
    low = [machine.arrive(f"low-{n}", 2, prompt=60, output=100) for n in range(4)]
    machine.step()
    high = machine.arrive("high", 0, prompt=60, output=100)
    while not high.output:
        machine.step()
    assert machine.lost and not any(sequence.output for sequence in low)


def test_steps_grow_again_when_memory_is_back() -> None:
    machine = Machine()
    machine.capacity = 8
    answers = [machine.arrive(str(n), 1, prompt=60, output=4) for n in range(6)]
    while any(sequence.status is not SequenceStatus.FINISHED for sequence in answers):
        machine.step()
    assert {sequence.finish_reason for sequence in answers} == {FinishReason.LENGTH}
    machine.capacity = 10_000
    machine.arrive("long", 1, output=240)
    lost = machine.lost
    for _ in range(8):
        machine.arrive(f"next-{machine.now}", 1, output=240)
        machine.steps(200)
    assert machine.lost == lost
    assert machine.core.scheduler.budget.tokens == ENGINE.max_num_batched_tokens


def test_no_tenant_is_charged_for_a_lost_step() -> None:
    machine = Machine()
    for n in range(6):
        machine.arrive(str(n), n % 3, output=5)
    machine.capacity = 4
    machine.drain()
    assert machine.lost
    assert sum(account.charged for account in machine.core.share.accounts.values()) == pytest.approx(machine.now)


def test_a_core_that_only_ever_loses_says_so() -> None:
    machine = Machine()
    machine.arrive("one", 0)
    outcomes = []
    while not outcomes or outcomes[-1]:
        machine.core.schedule(machine.now)
        outcomes.append(machine.core.rollback(machine.now))
    assert 10 < len(outcomes) < 30


# a step that stalls

DEVICE = DEVICES["llama3-8b-a100"]
STALL, STALLED_AT = 6.0, 25.0


class StallingDevice:
    """Takes as long as the published device does; one of its steps, after some time, takes `STALL` seconds more."""

    def __init__(self) -> None:
        self.time = 0.0

    def seconds(self, work: StepWork) -> float:
        took = DEVICE.seconds(work)
        if self.time < STALLED_AT <= self.time + took:
            took += STALL
        self.time += took
        return took


class Watch(Recorder):
    """Notes the times of first tokens."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Objective(), {})
        self.first: list[tuple[float, Sequence]] = []

    def completed(self, work: PlannedWork, elapsed: float, new_tokens: abc.Sequence[NewToken], now: float) -> None:
        self.first += [(now, sequence) for sequence, _, _ in new_tokens if len(sequence.output) == 1]
        super().completed(work, elapsed, new_tokens, now)


def stalled_run() -> tuple[Watch, Controller]:
    random, time = Random(3), 0.0
    arrivals = []
    while (time := time + random.expovariate(5.0)) < 80:
        level = random.choice((0, 2))
        prompt = random.randint(200, 1200)
        arrivals.append(Arrival(time, prompt, 60, tenant=f"t{level}", priority_class=level, deadline=2.0))
    simulated = parse_simulated_policy(
        "order=fair,max_num_batched_tokens=512,max_num_seqs=192,prefill_chunk=512", DEVICE
    )
    stalling = StallingDevice()
    device = replace(DEVICE, seconds=stalling.seconds)
    core, watch = simulated.make_core(), Watch(device)
    loop = Loop(core, device, watch, simulated.engine.max_model_len)
    stalling.time = 0.0  # calibration is over
    loop.run(arrivals)
    return watch, core


@pytest.fixture(scope="module")
def stalled() -> tuple[Watch, Controller]:
    return stalled_run()


def stall_of(watch: Watch) -> tuple[float, float]:
    """The longest time without a first token."""
    return max(pairwise(time for time, _ in watch.first), key=lambda pair: pair[1] - pair[0])


def test_after_a_stall_only_requests_that_cannot_be_in_time_are_given_up(
    stalled: tuple[Watch, Controller],
) -> None:
    watch, _ = stalled
    start, end = stall_of(watch)
    assert end - start > STALL - 1
    hit = [(arrival, outcome) for arrival, outcome in watch.outcomes if start < arrival.time < end - 2.5]
    assert hit and all(
        outcome in (AttemptOutcome.EXPIRED, AttemptOutcome.REFUSED, AttemptOutcome.LATE) for _, outcome in hit
    )
    assert sum(outcome is AttemptOutcome.LATE for _, outcome in hit) <= 3, "those in the steps that were in flight"
    before = [outcome for arrival, outcome in watch.outcomes if arrival.time < start - 2]
    after = [outcome for arrival, outcome in watch.outcomes if end + 5 < arrival.time]
    assert after.count(AttemptOutcome.GOOD) / len(after) > before.count(AttemptOutcome.GOOD) / len(before) - 0.03


def test_after_a_stall_what_is_due_first_goes_first(stalled: tuple[Watch, Controller]) -> None:
    watch, _ = stalled
    start, end = stall_of(watch)
    due = [s.request.first_token_by for time, s in watch.first if time >= end and start < s.arrival < end]
    assert len(due) > 1 and due == sorted(due, key=lambda by: by or 0.0)


def test_a_stall_does_not_bend_what_is_believed_of_steps() -> None:
    model = StepTimeModel(PRIOR_STEP_TIME)
    random = Random(1)
    works = [StepWork(random.randint(0, 400), n := random.randint(1, 100), n * 300) for _ in range(600)]
    for work in works[:300]:
        model.observe(work, DEVICE.seconds(work))
    before = [model.fitted.seconds(work) for work in works[:20]]
    model.observe(works[300], STALL)
    for work in works[301:]:
        model.observe(work, DEVICE.seconds(work))
        after = [model.fitted.seconds(work) for work in works[:20]]
        assert after == pytest.approx(before, rel=0.1)
