from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.outcome import Outcome
from gateway.telemetry.request_record import (
    MAX_SESSION_CHARS,
    MAX_TOGETHER,
    RequestRecord,
    Telemetry,
    Together,
    session_name,
    trace_context,
)
from tests.gateway.telemetry.records import a_record

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{PARENT}-01".encode()


def test_a_request_joins_the_trace_of_its_client() -> None:
    context = trace_context(VALID, b"vendor=1")
    assert (context.trace, context.parent_id, context.client_samples) == (TRACE, int(PARENT, 16), True)
    assert context.state == "vendor=1"
    assert context.span_id not in (0, context.parent_id)


def test_a_client_that_does_not_sample_is_not_said_to() -> None:
    assert trace_context(f"00-{TRACE}-{PARENT}-00".encode(), None).client_samples is False


def test_a_later_version_may_say_more() -> None:
    assert trace_context(f"01-{TRACE}-{PARENT}-01-more".encode(), None).trace == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        f"ff-{TRACE}-{PARENT}-01".encode(),
        f"00-{'0' * 32}-{PARENT}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"00-{TRACE.upper()}-{PARENT}-01".encode(),
        VALID + b"-more",
        VALID + b"\n",
        VALID[:-1],
    ],
)
def test_a_malformed_trace_context_begins_a_new_trace(header: bytes | None) -> None:
    context = trace_context(header, b"vendor=1")
    assert context.parent_id is None and context.state == "" and not context.client_samples
    assert context.trace != TRACE and context.trace_id


@given(st.binary(max_size=80), st.binary(max_size=2000))
def test_no_header_can_break_it(parent: bytes, state: bytes) -> None:
    context = trace_context(parent, state)
    assert 0 < context.trace_id < 2**128 and 0 < context.span_id < 2**64


def test_a_tracestate_that_is_too_long_is_left_behind() -> None:
    assert trace_context(VALID, b"a" * 513).state == ""


def test_sessions_with_long_or_masked_names_stay_apart() -> None:
    """They have limits of their own."""
    key = b"sk-sluice-" + b"a" * 40
    given = [b"one", b"x" * 200, b"x" * 201, b"x" * 128, key, key + b"b", b"of " + key]
    names = [session_name({b"session_id": name}) for name in given]
    assert len({*names}) == len(given) and names[0] == "one" and names[3] == "x" * 128
    assert all(name and len(name) <= MAX_SESSION_CHARS and "aaaa" not in name for name in names)
    assert names[1] == session_name({b"session_id": given[1]})
    assert session_name({b"session_id": b""}) is None


def test_requests_that_end_together_are_told_of_together_and_in_order() -> None:
    told, timers, telemetry = list[RequestRecord](), list[Callable[[], None]](), Telemetry(lambda: 0.0)
    telemetry.on_end.append(together := Together(told.append, timers.append))
    records = [a_record(request_id=f"req_{number}") for number in range(MAX_TOGETHER + 2)]
    for record in records[:2]:
        telemetry.ended(record, Outcome.COMPLETED)
    assert told == []
    (timer,) = timers
    timer()
    assert told == records[:2]
    for record in records[2:]:
        telemetry.ended(record, Outcome.COMPLETED)
    assert told == records, "as many do not wait for the timer"
    together.flush()
    assert told == records, "each once"


def test_a_request_that_cannot_be_recorded_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    told = list[str]()

    def tell(record: RequestRecord) -> None:
        if record.request_id == "bad":
            raise ValueError("bad")
        told.append(record.request_id)

    together = Together(tell)
    for name in ("one", "bad", "two"):
        together(a_record(request_id=name))
    together.flush()
    assert told == ["one", "two"]
    assert [line.message for line in caplog.records] == ["the end of a request was not recorded"]
