from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.admin.live_requests import LiveRequests, phases
from gateway.admin.request_summary import MAX_MOMENTS, MAX_SEQUENCES, RequestSummary
from gateway.admin.rows import MAX_ROWS, Reasons
from gateway.errors import BadRequest, RateLimited, RequestNotFound
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.admin.test_history import Site
from tests.gateway.telemetry.records import a_record, a_timeline


class Found(Site):
    def __init__(self) -> None:
        super().__init__()
        self.requests = LiveRequests(self.telemetry, self.history, Reasons(self.core.scheduler))

    def begin(self, request_id: str, response_id: str | None, began: float = 100.0) -> RequestRecord:
        record = a_record(request_id=request_id, response_id=response_id, began=began, ended=None, timelines=[])
        self.telemetry.live.add(record)
        return record

    def end(self, record: RequestRecord) -> None:
        self.telemetry.live.discard(record)
        record.ended = 101.0
        self.history.request_ended(record)


@pytest.fixture
def found() -> Found:
    return Found()


def test_a_request_is_found_by_either_id_while_it_lives_and_after(found: Found) -> None:
    record = found.begin("mine", "cmpl-1")
    assert found.requests.live("mine") is found.requests.live("cmpl-1") is record
    assert found.requests.shown("cmpl-1")["state"] == "ending"
    found.end(record)
    assert found.requests.shown("mine")["outcome"] == "completed"
    with pytest.raises(RequestNotFound, match="'mine' is live"):
        found.requests.live("mine")


def test_an_id_that_several_share_names_none_of_them(found: Found) -> None:
    found.begin("same", "cmpl-1")
    found.begin("same", "cmpl-2")
    with pytest.raises(BadRequest, match=r"2 requests have the id 'same': .*cmpl-1"):
        found.requests.live("same")
    assert found.requests.live("cmpl-2").response_id == "cmpl-2"


def test_a_client_that_takes_anothers_response_id_as_its_own_id_does_not_hide_it(found: Found) -> None:
    found.begin("cmpl-1", "cmpl-9")
    victim = found.begin("its-own", "cmpl-1")
    assert found.requests.live("cmpl-1") is victim


def test_running_requests_of_a_tenant_are_listed_oldest_first(found: Found) -> None:
    for name, began in (("late", 102.0), ("early", 101.0)):
        found.begin(name, None, began)
    record = found.begin("of another", None)
    record.tenant = "globex"
    assert [row["id"] for row in found.requests.live_of_tenant("acme", 50)] == ["early", "late"]
    assert [row["id"] for row in found.requests.live_of_tenant("acme", 1)] == ["early"]


async def test_the_oldest_are_shown_of_more_than_a_page_can_hold(found: Found) -> None:
    for number in range(MAX_ROWS + 3):
        found.begin(f"r{number}", None, began=float(number))
    listed = await found.requests.listed()
    assert (len(listed["live"]), listed["truncated"]) == (MAX_ROWS, 3)
    assert listed["live"][0]["id"] == "r0"


async def test_ended_requests_come_newest_first_with_their_waits(found: Found) -> None:
    for name in ("one", "two"):
        found.end(a_record(request_id=name))
    newest, _ = (await found.requests.listed())["recent"]
    assert newest["id"] == "two"
    assert newest["duration"] == pytest.approx(1.0)
    assert newest["queue_seconds"] == pytest.approx(0.006)
    assert (newest["status"], newest["code"], newest["prompt_tokens"]) == (200, None, 10)


def test_a_tenants_are_only_its_own(found: Found) -> None:
    for tenant in ("acme", "other", "acme"):
        found.end(a_record(tenant=tenant, error=RateLimited("no"), outcome=Outcome.REFUSED))
    assert [row["tenant"] for row in found.requests.of_tenant("acme", 10)] == ["acme", "acme"]
    assert len(found.requests.of_tenant("acme", 1)) == 1


async def test_a_request_that_does_not_generate_is_not_listed(found: Found) -> None:
    found.telemetry.live.add(a_record(operation=None))
    assert (await found.requests.listed())["live"] == []


Told = list[tuple[str, float, float | None]]


def told(**changes: Any) -> Told:
    """What happened, from when until when, in milliseconds."""
    spans = phases(RequestSummary.of(a_record(**changes)))
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
    details = {span.what: span.detail for span in phases(RequestSummary.of(a_record()))}
    assert details["prefill"] == "10 prompt tokens in 2 chunks"
    assert details["decode"] == "4 tokens"
    assert details["end"] == "completed"


def test_a_phase_that_goes_on_has_no_end() -> None:
    timeline = a_timeline(first_token=None, prefilled=None, ended=None)
    assert told(timelines=[timeline], ended=None, settling=None)[-2:] == [("queue", 4, 10), ("prefill", 10, None)]
    waiting = a_timeline(admitted=None, first_token=None, prefilled=None, ended=None)
    assert told(timelines=[waiting], ended=None, settling=None)[-1] == ("queue", 4, None)
    assert told(timelines=[], ended=None, settling=None, authenticated=None) == [("reserve", 3, 4)]


def test_a_request_that_left_the_queue_waited_until_then() -> None:
    timeline = a_timeline(admitted=None, first_token=None, prefilled=None, ended=100.06)
    assert ("queue", 4, 60) in told(timelines=[timeline])


def test_a_refusal_says_why() -> None:
    error = RateLimited("0 are left.")
    record = a_record(error=error, outcome=Outcome.REFUSED, timelines=[], reserved=None, settling=None)
    *_, reserve, end = phases(RequestSummary.of(record))
    assert (reserve.what, reserve.until) == ("reserve", end.at)
    assert (end.what, end.detail) == ("end", "refused: 0 are left.")


def test_a_preemption_lasts_until_it_is_resumed() -> None:
    shown = told(timelines=[a_timeline(preempted=[100.040, 100.060], resumed=[100.050])])
    assert [entry for entry in shown if entry[0] in ("preempted", "resumed")] == [
        ("preempted", 40, 50),
        ("resumed", 50, None),
        ("preempted", 60, 80),  # when the request ended
    ]


def test_several_sequences_are_told_apart_up_to_a_limit() -> None:
    spans = phases(RequestSummary.of(a_record(timelines=[a_timeline() for _ in range(100)])))
    queues = [span.detail for span in spans if span.what == "queue"]
    assert len(queues) == MAX_SEQUENCES
    assert set(queues) == {f"sequence {number} of 100" for number in range(1, MAX_SEQUENCES + 1)}


def test_a_sequence_that_was_preempted_for_ever_is_told_within_bounds() -> None:
    moments = [100.03 + n / 1e5 for n in range(1000)]
    spans = phases(RequestSummary.of(a_record(timelines=[a_timeline(preempted=moments, resumed=moments)])))
    assert sum(span.what == "preempted" for span in spans) == MAX_MOMENTS


def test_a_record_has_the_waits_that_tables_show() -> None:
    summary = RequestSummary.of(a_record())
    assert summary.queue_seconds == pytest.approx(0.006)
    assert summary.ttft == pytest.approx(0.03)
    assert summary.unix(100.08) == pytest.approx(1_800_000_000.08)
    waiting = RequestSummary.of(a_record(timelines=[a_timeline(), a_timeline(admitted=None, first_token=None)]))
    assert waiting.queue_seconds is None
    late = RequestSummary.of(
        a_record(timelines=[*(a_timeline() for _ in range(MAX_SEQUENCES)), a_timeline(admitted=100.05)])
    )
    assert late.queue_seconds == pytest.approx(0.046)
    assert RequestSummary.of(a_record(timelines=[])).ttft is None
