import random

import pytest

from admission.core import CoreConfig, MemoryGate
from backend.config import EngineConfig
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import SequenceTimeline
from tests.gateway.telemetry.core_run import CoreRun

ENGINE = EngineConfig(
    num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, prefill_chunk=8, max_model_len=48
)


class Run(CoreRun):
    def __init__(self) -> None:
        super().__init__(CoreConfig(memory=MemoryGate.OPTIMISTIC), ENGINE)
        self.steps: list[CompletedStep] = []
        self.released: list[SequenceTimeline] = []
        self.core_telemetry.on_step.append(self.steps.append)
        self.core_telemetry.on_release.append(self.released.append)

    def lose(self) -> None:
        self.core.rollback(self.now)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_trail_has_the_moments_of_a_sequence(run: Run) -> None:
    timeline = run.arrive("a", prompt=12, max_tokens=3)
    run.run()
    assert (timeline.queued, timeline.admitted) == (100.0, 100.0)
    assert [(chunk.start, chunk.length) for chunk in timeline.chunks] == [(0, 8), (8, 4)]
    assert timeline.first_token == timeline.prefilled == pytest.approx(100.02)
    assert timeline.ended == timeline.released == pytest.approx(100.04)


def test_steps_are_told_of_with_what_they_did(run: Run) -> None:
    run.arrive("a", prompt=12, max_tokens=3)
    run.run()
    assert [step.scheduled.batch.num_decodes for step in run.steps] == [0, 0, 1, 1]
    assert [step.prefill_tokens for step in run.steps] == [8, 4, 0, 0]
    assert all(step.elapsed == 0.01 and step.scheduled.planning > 0 for step in run.steps)


def test_a_preempted_sequence_shows_when_it_gave_way_and_when_it_came_back(run: Run) -> None:
    timelines = [run.arrive(name, prompt=8, max_tokens=30) for name in "ab"]
    run.run()
    (victim,) = [timeline for timeline in timelines if timeline.preempted]
    assert len(victim.resumed) == len(victim.preempted)
    assert all(away < back for away, back in zip(victim.preempted, victim.resumed, strict=True))


def test_a_preemption_shows_even_where_no_step_was_planned(run: Run) -> None:
    timelines, in_vain = [], 0
    for name in "ab":
        timelines.append(run.arrive(name, prompt=4, max_tokens=40))
        run.now += 0.001  # the younger gives way
    while run.core.scheduler.has_work:
        while not run.core.scheduler.is_full:
            if not run.plan():
                in_vain += len(run.core.scheduler.preempted)
                break
        run.plan()  # says nothing new where as many steps are in flight as may be
        run.complete()
    assert in_vain
    for timeline in timelines:
        assert len(timeline.preempted) == timeline.sequence.num_preemptions + timeline.sequence.num_yields


def test_a_step_that_was_lost_leaves_no_chunk(run: Run) -> None:
    timeline = run.arrive("a", prompt=20, max_tokens=3)
    run.step()
    run.plan(), run.plan()
    run.lose()
    assert [chunk.start for chunk in timeline.chunks] == [0]
    run.run()
    starts = [chunk.start for chunk in timeline.chunks]
    assert starts == sorted(set(starts)) and sum(chunk.length for chunk in timeline.chunks) == 20


def test_blocks_of_a_cut_sequence_are_released_with_a_lost_step(run: Run) -> None:
    timeline = run.arrive("a", prompt=20, max_tokens=3)
    run.plan()
    run.cancel(timeline)
    assert not run.released
    run.lose()
    assert run.released == [timeline] and timeline.released == run.now and not timeline.chunks


def test_blocks_of_a_cut_sequence_are_released_with_its_last_step(run: Run) -> None:
    timeline = run.arrive("a", prompt=8, max_tokens=30)
    run.step()
    run.plan()
    run.cancel(timeline)
    assert timeline.ended == run.now and timeline.released is None and not run.released
    run.complete()
    assert timeline.released == run.now and run.released == [timeline]


def test_nothing_is_kept_of_ended_sequences(run: Run) -> None:
    rng = random.Random(1)
    living: list[SequenceTimeline] = []
    for number in range(300):
        living.append(run.arrive(str(number), rng.randrange(1, 20), rng.randrange(1, 20), level=rng.randrange(3)))
        if rng.random() < 0.5:
            run.cancel(living.pop(rng.randrange(len(living))))
        run.step()
        run.core.take_ended()
    while run.step():
        run.core.take_ended()
    assert run.core.schedule(run.now) is None
    assert not run.core_telemetry._timelines and not run.core_telemetry._releasing


def test_a_listener_that_fails_stops_neither_the_others_nor_the_core(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("a listener's own mistake")

    for listeners in (run.core_telemetry.on_admit, run.core_telemetry.on_step, run.core_telemetry.on_release):
        listeners.insert(0, fail)
    timeline = run.arrive("a", prompt=4, max_tokens=2)
    run.run()
    assert timeline.released is not None
    assert (len(run.steps), run.released) == (2, [timeline])
    assert [record.getMessage() for record in caplog.records] == ["a listener of the core failed"] * 4
