"""The framing of events, read back by the official client's decoder."""

from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st
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


@given(st.lists(st.sampled_from([b"data: 1\n\n", b": 2 tokens\n\n", b"event: x\ndata: 3\n\n"])), st.randoms())
def test_parts_of_any_size_are_cut_behind_events(events: list[bytes], dice: Random) -> None:
    stream, whole, parts = b"".join(events) + b"data: beg", sse.WholeEvents(), list[bytes]()
    while stream:
        size = dice.randint(1, 12)
        parts.append(whole.add(stream[:size]))
        stream = stream[size:]
    assert b"".join(parts) == b"".join(events)
    assert whole.rest == b"data: beg"
    assert all(part.endswith(sse.END) for part in parts if part)
