"""Where the time of a request went."""

from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.admin.record import MAX_LEGS, MAX_MOMENTS, Record
from gateway.admin.timeline import timeline
from gateway.errors import RateLimited
from tests.gateway.telemetry.stories import a_story, a_trail

Told = list[tuple[str, float, float | None]]


def told(**changes: Any) -> Told:
    """What happened, from when until when, in milliseconds."""
    spans = timeline(Record.of(a_story(**changes)))
    return [(s.what, round(1000 * s.at, 6), None if s.until is None else round(1000 * s.until, 6)) for s in spans]


def test_a_request_that_was_served_is_told_from_its_key_to_its_end() -> None:
    assert told() == [
        ("auth", 0, 1),
        ("body", 1, 2),
        ("reserve", 3, 4),
        ("queue", 4, 10),
        ("prefill", 10, 30),
        ("first token", 30, None),
        ("decode", 30, 70),
        ("settle", 75, 80),
        ("end", 80, None),
    ]


def test_details_say_how_much_and_how_it_ended() -> None:
    details = {span.what: span.detail for span in timeline(Record.of(a_story()))}
    assert details["prefill"] == "10 prompt tokens in 2 chunks"
    assert details["decode"] == "4 tokens"
    assert details["end"] == "completed"


def test_what_still_goes_on_has_no_end() -> None:
    trail = a_trail(first_token=None, prefilled=None, ended=None)
    assert told(trails=[trail], ended=None, settling=None)[-2:] == [("queue", 4, 10), ("prefill", 10, None)]
    waiting = a_trail(admitted=None, first_token=None, prefilled=None, ended=None)
    assert told(trails=[waiting], ended=None, settling=None)[-1] == ("queue", 4, None)
    assert told(trails=[], ended=None, settling=None, authenticated=None) == [("reserve", 3, 4)]


def test_one_that_left_while_it_waited_waited_until_then() -> None:
    trail = a_trail(admitted=None, first_token=None, prefilled=None, ended=100.06)
    assert ("queue", 4, 60) in told(trails=[trail])


def test_a_refusal_says_why() -> None:
    error = RateLimited("0 are left.")
    story = a_story(error=error, outcome=Outcome.REFUSED, trails=[], reserved=None, settling=None)
    *_, reserve, end = timeline(Record.of(story))
    assert (reserve.what, reserve.until) == ("reserve", end.at)
    assert (end.what, end.detail) == ("end", "refused: 0 are left.")


def test_a_preemption_lasts_until_it_is_resumed() -> None:
    shown = told(trails=[a_trail(preempted=[100.040, 100.060], resumed=[100.050])])
    assert [entry for entry in shown if entry[0] in ("preempted", "resumed")] == [
        ("preempted", 40, 50),
        ("resumed", 50, None),
        ("preempted", 60, 80),  # when the request ended
    ]


def test_several_sequences_are_told_apart_and_only_so_many_of_them() -> None:
    spans = timeline(Record.of(a_story(trails=[a_trail() for _ in range(100)])))
    queues = [span.detail for span in spans if span.what == "queue"]
    assert len(queues) == MAX_LEGS
    assert set(queues) == {f"sequence {number} of 100" for number in range(1, MAX_LEGS + 1)}


def test_a_sequence_that_was_preempted_for_ever_is_told_within_bounds() -> None:
    moments = [100.03 + n / 1e5 for n in range(1000)]
    spans = timeline(Record.of(a_story(trails=[a_trail(preempted=moments, resumed=moments)])))
    assert sum(span.what == "preempted" for span in spans) == MAX_MOMENTS


def test_a_record_has_the_waits_that_tables_show() -> None:
    record = Record.of(a_story())
    assert record.queue_seconds == pytest.approx(0.006)
    assert record.ttft == pytest.approx(0.03)
    assert record.unix(100.08) == pytest.approx(1_800_000_000.08)
    waiting = Record.of(a_story(trails=[a_trail(), a_trail(admitted=None, first_token=None)]))
    assert waiting.queue_seconds is None
    late = Record.of(a_story(trails=[*(a_trail() for _ in range(MAX_LEGS)), a_trail(admitted=100.05)]))
    assert late.queue_seconds == pytest.approx(0.046)
    assert Record.of(a_story(trails=[])).ttft is None
