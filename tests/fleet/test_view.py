from dataclasses import replace

from fleet.view import SILENCE_SECONDS, Condition
from tests.fleet.states import IDLE, view, work


def test_a_request_on_its_way_counts_until_a_later_state_is_read() -> None:
    one = view("a", now=1.0, waiting={"t": work(2.0)})
    attempt = one.sent("t", work(1.0), 1.5)
    assert one.waiting["t"] == work(3.0, 2)
    assert not one.told(IDLE, 1.4, 1.5), "asked for before it was sent"
    assert one.waiting["t"] == work(1.0)
    one.told(IDLE, 1.6, 1.7)
    assert not one.waiting
    assert one.load == 1, "it has not ended"
    one.ended(attempt)
    assert one.load == 0


def test_new_requests_go_to_replicas_with_a_recent_state_that_do_not_drain() -> None:
    one = view("a", now=1.0)
    assert one.is_available(1.0)
    assert not one.is_available(1.0 + SILENCE_SECONDS)
    one.told(replace(IDLE, draining=True), 5.0, 5.0)
    assert not one.is_available(5.0)
    one.told(IDLE, 6.0, 6.0)
    one.lost()
    assert not one.is_available(6.0)


def test_the_gravest_reason_is_told() -> None:
    one = view("a", now=1.0)
    one.ejection.failed(1.0)
    one.ejection.failed(1.0)
    assert one.condition(1.5) is Condition.EJECTED
    one.told(replace(IDLE, draining=True), 1.5, 1.5)
    assert one.condition(1.5) is Condition.DRAINING
    assert one.condition(1.5 + SILENCE_SECONDS) is Condition.SILENT


def test_a_restart_is_noticed() -> None:
    one = view("a")
    assert not one.told(IDLE, 1.0, 1.0)
    assert one.told(replace(IDLE, instance="2"), 2.0, 2.0)


def test_a_request_at_a_lost_replica_is_given_up_once() -> None:
    one, told = view("a"), list[int]()
    waiting, answered = one.sent("t", work(1.0), 1.0), one.sent("t", work(1.0), 1.0)
    waiting.give_up = lambda: told.append(1)
    answered.give_up = None
    one.lost()
    assert told == [1]
