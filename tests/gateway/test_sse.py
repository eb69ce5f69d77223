"""The framing of events, read back by the official client's decoder."""

from collections.abc import Iterator

from openai._streaming import SSEDecoder

from gateway import sse


def decoded(stream: bytes) -> list[str]:
    def chunks() -> Iterator[bytes]:
        yield stream

    return [event.data for event in SSEDecoder().iter_bytes(chunks())]


def test_events_joined_into_one_write_are_read_one_by_one() -> None:
    assert decoded(sse.event(b'{"a":1}') + sse.event(b'{"b":2}') + sse.DONE) == ['{"a":1}', '{"b":2}', "[DONE]"]


def test_comments_are_invisible() -> None:
    assert decoded(sse.progress(0) + sse.event(b"1") + b": still here\n\n" + sse.DONE) == ["1", "[DONE]"]


def test_proxies_are_told_not_to_hold_events_back() -> None:
    assert sse.HEADERS["content-type"].startswith("text/event-stream")
    assert sse.HEADERS["cache-control"] == "no-cache"
    assert sse.HEADERS["x-accel-buffering"] == "no"


def test_progress_is_found_at_the_end_of_what_has_come_and_no_client_sees_it() -> None:
    stream = sse.event(b'{"a":": 9 tokens\\n\\n"}') + sse.progress(1) + sse.event(b'{"b":2}') + sse.progress(12)
    assert decoded(stream) == ['{"a":": 9 tokens\\n\\n"}', '{"b":2}']
    found = [sse.last_progress(stream[:end]) for end in range(len(stream) + 1)]
    assert found == sorted(found, key=lambda count: count or 0)
    assert (found[0], found[-2], found[-1]) == (None, 1, 12)
    assert sse.last_progress(b": hello\n\n") is None
