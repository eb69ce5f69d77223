"""Sequences are given up when nobody can use their answers any more; controlled delay is a baseline."""

from admission.deadline import ControlledDelay, DeadlineExpiry
from backend.scheduler.sequence import Sequence, SequenceStatus
from tests.admission.sequences import make_sequence

PREFILL = 0.5
INTERVAL, TARGET = 2.0, 0.5


def watched(*sequences: Sequence) -> DeadlineExpiry:
    deadlines = DeadlineExpiry(lambda _: PREFILL)
    for each in sequences:
        deadlines.arrived(each, 0.0)
    return deadlines


def test_whoever_waits_is_given_up_when_even_the_fastest_prefill_would_be_late() -> None:
    one = make_sequence("one", first_token_by=2.0)
    deadlines = watched(one)
    assert deadlines.due(1.5) == []
    assert deadlines.due(1.6) == [one]


def test_whoever_waits_is_not_given_up_while_prefill_has_turned_out_to_be_fast_enough() -> None:
    prefill, one = 0.5, make_sequence("one", first_token_by=2.0)
    deadlines = DeadlineExpiry(lambda _: prefill)
    deadlines.arrived(one, 0.0)
    prefill = 0.125
    assert deadlines.due(1.75) == [] and deadlines.due(1.875) == []
    assert deadlines.due(1.9) == [one]


def test_whoever_is_being_computed_has_until_the_deadline() -> None:
    one = make_sequence("one", first_token_by=2.0)
    one.status = SequenceStatus.RUNNING
    deadlines = watched(one)
    assert deadlines.due(1.9) == [] and deadlines.due(2.0) == [] and deadlines.due(2.1) == [one]


def test_whoever_waits_for_its_last_token_is_given_up_when_not_even_the_first_would_come_by_then() -> None:
    one = make_sequence("one", done_by=2.0)
    deadlines = watched(one)
    assert deadlines.due(1.5) == [] and deadlines.due(1.6) == [one]
    running = make_sequence("running", done_by=2.0)
    running.status = SequenceStatus.RUNNING
    deadlines = watched(running)
    assert deadlines.due(1.6) == [] and deadlines.due(2.1) == [running]


def test_whoever_has_missed_several_deadlines_is_given_up_once_and_in_their_order() -> None:
    late, later = (
        make_sequence("late", first_token_by=1.0, done_by=4.0),
        make_sequence("later", first_token_by=2.0, done_by=3.0),
    )
    deadlines = watched(later, late)
    assert deadlines.due(9.0) == [late, later] and deadlines.due(9.0) == []


def test_a_first_token_settles_the_first_deadline_and_not_the_last() -> None:
    one = make_sequence("one", first_token_by=2.0, done_by=5.0)
    one.status, one.output = SequenceStatus.RUNNING, [7]
    deadlines = watched(one)
    assert deadlines.due(3.0) == [] and deadlines.due(5.1) == [one]


def test_whoever_has_ended_or_has_no_deadline_is_never_given_up() -> None:
    ended, free = make_sequence("ended", first_token_by=1.0), make_sequence("free")
    ended.status = SequenceStatus.FINISHED
    assert watched(ended, free).due(1e9) == []


def test_many_that_have_ended_are_not_kept() -> None:
    deadlines = DeadlineExpiry(lambda _: PREFILL)
    for n in range(5000):
        one = make_sequence(str(n), first_token_by=1e6)
        deadlines.arrived(one, 0.0)
        one.status = SequenceStatus.FINISHED
    assert len(deadlines._heap) < 200


def test_after_an_empty_queue_everyone_may_wait_for_the_interval() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    one = make_sequence("one")
    delay.arrived(one, 10.0)
    assert delay.due(10.0 + TARGET + 0.1) == [] and delay.due(10.0 + INTERVAL) == [one]


def test_a_queue_that_has_not_run_empty_for_an_interval_lets_nobody_wait_longer_than_the_target() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    waiting = [make_sequence(str(n)) for n in range(30)]
    for n, each in enumerate(waiting):
        delay.arrived(each, n / 10)
        if n >= 2:
            delay.left_queue(waiting[n - 2], n / 10)  # two wait at any time
    late, early = waiting[-2:]
    assert delay.due(2.9 + TARGET - 0.05) == [late] and delay.due(2.9 + TARGET + 0.05) == [late, early]


def test_patience_is_long_again_once_the_queue_has_run_empty() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    stuck, later = make_sequence("stuck"), make_sequence("later")
    delay.arrived(stuck, 0.0)
    assert delay.due(3.0) == [stuck]
    delay.left_queue(stuck, 3.0)
    delay.arrived(later, 3.0)
    assert delay.due(3.0 + TARGET + 0.1) == [] and delay.due(3.0 + INTERVAL + 0.1) == [later]


def test_whoever_leaves_the_queue_is_not_given_up() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    one = make_sequence("one")
    delay.arrived(one, 0.0)
    delay.left_queue(one, 0.1)
    delay.left_queue(one, 0.2)
    assert delay.due(100.0) == []
