"""CoDel for requests, as a baseline: patience is short while the queue does not run empty."""

from admission.deadline import ControlledDelay
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import Sequence

INTERVAL, TARGET = 2.0, 0.5


def sequence(name: str) -> Sequence:
    return Sequence(name, "a", [0], SamplingParams(), 1, 0, frozenset())


def test_after_an_empty_queue_everyone_may_wait_for_the_interval() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    one = sequence("one")
    delay.arrived(one, 10.0)
    assert delay.due(10.0 + TARGET + 0.1) == [] and delay.due(10.0 + INTERVAL) == [one]


def test_a_queue_that_has_not_run_empty_for_an_interval_lets_nobody_wait_longer_than_the_target() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    waiting = [sequence(str(n)) for n in range(30)]
    for n, each in enumerate(waiting):
        delay.arrived(each, n / 10)
        if n >= 2:
            delay.left_queue(waiting[n - 2], n / 10)  # two wait at any time
    late, early = waiting[-2:]
    assert delay.due(2.9 + TARGET - 0.05) == [late] and delay.due(2.9 + TARGET + 0.05) == [late, early]


def test_patience_is_long_again_once_the_queue_has_run_empty() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    stuck, later = sequence("stuck"), sequence("later")
    delay.arrived(stuck, 0.0)
    assert delay.due(3.0) == [stuck]
    delay.left_queue(stuck, 3.0)
    delay.arrived(later, 3.0)
    assert delay.due(3.0 + TARGET + 0.1) == [] and delay.due(3.0 + INTERVAL + 0.1) == [later]


def test_whoever_leaves_the_queue_is_not_given_up() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    one = sequence("one")
    delay.arrived(one, 0.0)
    delay.left_queue(one, 0.1)
    delay.left_queue(one, 0.2)
    assert delay.due(100.0) == []
