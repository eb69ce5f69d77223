"""Who is given up, and when."""

from admission.deadline import DeadlineExpiry
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import Sequence, SequenceStatus

PREFILL = 0.5


def sequence(name: str, first_token_by: float | None = None, done_by: float | None = None) -> Sequence:
    return Sequence(
        name, "a", [0] * 8, SamplingParams(), 8, 0, frozenset(), first_token_by=first_token_by, done_by=done_by
    )


def watched(*sequences: Sequence) -> DeadlineExpiry:
    deadlines = DeadlineExpiry(lambda _: PREFILL)
    for each in sequences:
        deadlines.arrived(each, 0.0)
    return deadlines


def test_whoever_waits_is_given_up_when_even_the_fastest_prefill_would_be_late() -> None:
    one = sequence("one", first_token_by=2.0)
    deadlines = watched(one)
    assert deadlines.due(1.5) == []
    assert deadlines.due(1.6) == [one]


def test_whoever_waits_is_not_given_up_while_prefill_has_turned_out_to_be_fast_enough() -> None:
    prefill, one = 0.5, sequence("one", first_token_by=2.0)
    deadlines = DeadlineExpiry(lambda _: prefill)
    deadlines.arrived(one, 0.0)
    prefill = 0.125
    assert deadlines.due(1.75) == [] and deadlines.due(1.875) == []
    assert deadlines.due(1.9) == [one]


def test_whoever_is_being_computed_has_until_the_deadline() -> None:
    one = sequence("one", first_token_by=2.0)
    one.status = SequenceStatus.RUNNING
    deadlines = watched(one)
    assert deadlines.due(1.9) == [] and deadlines.due(2.0) == [] and deadlines.due(2.1) == [one]


def test_whoever_waits_for_its_last_token_is_given_up_when_not_even_the_first_would_come_by_then() -> None:
    one = sequence("one", done_by=2.0)
    deadlines = watched(one)
    assert deadlines.due(1.5) == [] and deadlines.due(1.6) == [one]
    running = sequence("running", done_by=2.0)
    running.status = SequenceStatus.RUNNING
    deadlines = watched(running)
    assert deadlines.due(1.6) == [] and deadlines.due(2.1) == [running]


def test_whoever_has_missed_several_deadlines_is_given_up_once_and_in_their_order() -> None:
    late, later = sequence("late", first_token_by=1.0, done_by=4.0), sequence("later", first_token_by=2.0, done_by=3.0)
    deadlines = watched(later, late)
    assert deadlines.due(9.0) == [late, later] and deadlines.due(9.0) == []


def test_a_first_token_settles_the_first_deadline_and_not_the_last() -> None:
    one = sequence("one", first_token_by=2.0, done_by=5.0)
    one.status, one.output = SequenceStatus.RUNNING, [7]
    deadlines = watched(one)
    assert deadlines.due(3.0) == [] and deadlines.due(5.1) == [one]


def test_whoever_has_ended_or_has_no_deadline_is_never_given_up() -> None:
    ended, free = sequence("ended", first_token_by=1.0), sequence("free")
    ended.status = SequenceStatus.FINISHED
    assert watched(ended, free).due(1e9) == []


def test_many_that_have_ended_are_not_kept() -> None:
    deadlines = DeadlineExpiry(lambda _: PREFILL)
    for n in range(5000):
        one = sequence(str(n), first_token_by=1e6)
        deadlines.arrived(one, 0.0)
        one.status = SequenceStatus.FINISHED
    assert len(deadlines._heap) < 200
