"""Frames of a link: whole and in order however their bytes are split, a few in a turn, and none once an end is gone."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.link import BYTES_PER_TURN, FRAMES_PER_TURN, FrameKind, WorkerLink, frame, read_frame

Frame = tuple[FrameKind, Any, bytes]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | texts
messages = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3))
frames = st.tuples(st.sampled_from(FrameKind), messages, st.binary(max_size=40))


class PaperTransport:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.is_reading = True
        self.is_aborted = self.is_closed = False
        self.written: list[bytes] = []

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


class PaperEnd:
    """One end of a link, whose frames are noted."""

    def __init__(self, receive: Callable[[FrameKind, Any, memoryview], object] | None = None) -> None:
        self.received: list[Frame] = []
        self.num_lost = 0
        self.transport = PaperTransport()
        self.link = WorkerLink(receive or self.note, self.lost)
        self.link.connection_made(cast(asyncio.Transport, self.transport))

    def note(self, kind: FrameKind, message: Any, binary: memoryview) -> None:
        self.received.append((kind, message, bytes(binary)))

    def lost(self) -> None:
        self.num_lost += 1

    async def handled(self) -> None:
        """Wait until it reads again."""
        while not self.transport.is_reading:
            await asyncio.sleep(0)


@given(st.lists(frames, max_size=40), st.data())
async def test_frames_come_whole_and_in_order_however_their_bytes_are_split(
    sent: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(frame(*one) for one in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    end = PaperEnd()
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        end.link.data_received(stream[start:stop])  # also while it reads no more: some may be on its way
        if data.draw(st.booleans()):
            await asyncio.sleep(0)
    await end.handled()
    assert end.received == sent


async def test_a_flood_is_handled_a_few_frames_in_a_turn_and_not_read_meanwhile() -> None:
    end = PaperEnd()
    end.link.data_received(frame(FrameKind.STATS) * (3 * FRAMES_PER_TURN + 1))
    counts = [len(end.received)]
    while not end.transport.is_reading:
        await asyncio.sleep(0)
        counts.append(len(end.received))
    assert counts == [FRAMES_PER_TURN, 2 * FRAMES_PER_TURN, 3 * FRAMES_PER_TURN, 3 * FRAMES_PER_TURN + 1]


async def test_large_frames_are_handled_one_in_a_turn() -> None:
    end = PaperEnd()
    end.link.data_received(frame(FrameKind.STATS, None, bytes(BYTES_PER_TURN)) * 3)
    counts = [len(end.received)]
    while not end.transport.is_reading:
        await asyncio.sleep(0)
        counts.append(len(end.received))
    assert counts == [1, 2, 3]


async def test_a_large_frame_is_joined_once_however_many_parts_it_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    end, num_looks = PaperEnd(), list[int]()
    handle_some = end.link._handle_some
    monkeypatch.setattr(end.link, "_handle_some", lambda data: (num_looks.append(len(data)), handle_some(data))[1])
    sent = frame(FrameKind.ANSWER, [1], bytes(2**20))
    for start in range(0, len(sent), 2**12):
        end.link.data_received(sent[start : start + 2**12])
    assert end.received == [(FrameKind.ANSWER, [1], bytes(2**20))]
    assert num_looks == [2**12, len(sent)]


async def test_nothing_is_begun_for_an_end_that_is_gone() -> None:
    """What it had was ended: a request that began after that would never end."""
    end = PaperEnd()
    end.link.data_received(frame(FrameKind.GENERATE) * 100)
    end.link.connection_lost(None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(end.received), end.num_lost) == (FRAMES_PER_TURN, 1)


@pytest.mark.parametrize("position", [0, FRAMES_PER_TURN], ids=["first", "later turn"])
async def test_a_frame_that_cannot_be_handled_closes_the_link(position: int, caplog: pytest.LogCaptureFixture) -> None:
    def receive(kind: FrameKind, message: Any, binary: memoryview) -> None:
        assert message != "wrong"

    end = PaperEnd(receive)
    end.link.data_received(
        frame(FrameKind.STATS) * position + frame(FrameKind.ASK, "wrong") + frame(FrameKind.ASK, "wrong")
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert end.transport.is_aborted
    assert caplog.text.count("a frame could not be handled") == 1


async def test_an_unknown_kind_closes_the_link() -> None:
    end = PaperEnd()
    end.link.data_received(b"\xff" + frame(FrameKind.ASK)[1:])
    assert end.transport.is_aborted
    assert not end.received


async def test_messages_of_one_turn_share_a_write() -> None:
    end = PaperEnd()
    end.link.send(FrameKind.ADMITTED, [1, {}])
    end.link.send(FrameKind.TOKENS, None, b"12345678")
    assert not end.transport.written
    await asyncio.sleep(0)
    assert end.transport.written == [frame(FrameKind.ADMITTED, [1, {}]) + frame(FrameKind.TOKENS, None, b"12345678")]
    end.link.send(FrameKind.STOP, [1, 0, 5])
    end.link.close()
    assert end.transport.written[1:] == [frame(FrameKind.STOP, [1, 0, 5])]
    assert end.transport.is_closed


async def test_messages_to_a_closed_end_vanish() -> None:
    end = PaperEnd()
    end.link.send(FrameKind.STOP, [1, 0, 5])
    end.link.connection_lost(None)
    end.link.send(FrameKind.CLOSE, 1)
    await asyncio.sleep(0)
    end.link.close()
    assert not end.transport.written


async def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    end = PaperEnd()
    end.link.data_received(frame(FrameKind.ENDED, ["\ud800", {"a\udfffb": [1, ("\udc00", None)]}]))
    assert end.received == [(FrameKind.ENDED, ["?", {"a?b": [1, ["?", None]]}], b"")]


def test_a_blocking_end_reads_one_frame_that_comes_in_parts() -> None:
    mine, other = socket.socketpair()
    with mine, other:
        raw = frame(FrameKind.SETUP, None, b"a" * 100) + frame(FrameKind.DRAIN)
        other.sendall(raw)
        assert read_frame(mine) == (FrameKind.SETUP, b"a" * 100)
        assert read_frame(mine) == (FrameKind.DRAIN, b"")
        other.sendall(raw[:50])
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            read_frame(mine)
