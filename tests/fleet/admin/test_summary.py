from dataclasses import replace

import pytest

from fleet.admin.summary import summarized
from fleet.view import SILENCE_SECONDS, Condition
from gateway.replica.state import KVTokens
from tests.fleet.states import IDLE, work
from tests.fleet.test_fleet import ASK, Three


def test_a_replica_is_shown_with_what_it_told_and_what_was_sent_there() -> None:
    three = Three()
    view = three.views["a:8000"]
    state = replace(
        IDLE, running=3, waiting={"t": work(2.0, 2), "u": work(1.0)}, work_seconds=9.0, kv=KVTokens(100, 50, 30, 40, 10)
    )
    three.told(view, state, three.clock())
    with three.attempt(ASK, view):
        seen = summarized(three, view)
    assert (seen.name, seen.condition, seen.attempts, seen.open_requests, seen.on_the_way) == (
        "a:8000",
        Condition.SERVING,
        1,
        1,
        1,
    )
    assert seen.told is not None
    assert (seen.told.running, seen.told.waiting, seen.told.work_seconds) == (3, 3, 9.0)
    assert seen.told.kv_share == pytest.approx(0.2)
    assert seen.told.hit_share == pytest.approx(0.25)
    assert summarized(three, three.views["b:8000"]).told.hit_share is None, "it had no prompt"  # type: ignore[union-attr]


def test_conditions_say_why_nothing_is_sent_there() -> None:
    three = Three()
    a, b, c = three.views.values()
    three.tell("a", draining=True)
    three.fail("b")
    assert [summarized(three, one).condition for one in (a, b, c)] == ["draining", "ejected", "serving"]
    assert summarized(three, b).left_out_seconds == pytest.approx(1.0)
    three.pass_time(SILENCE_SECONDS)
    seen = summarized(three, c)
    assert (seen.condition, seen.silent_seconds) == ("silent", SILENCE_SECONDS)
    three.lost(c)
    three.pass_time(1.0)
    seen = summarized(three, c)
    assert (seen.condition, seen.silent_seconds, seen.told) == ("silent", SILENCE_SECONDS + 1, None), (
        "the moment is kept"
    )
