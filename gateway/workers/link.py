"""Frames over the Unix socket between the engine's process and an HTTP worker.

A frame is a kind, a JSON part and a binary part: `<BII`, with the lengths of both, and these. All that is sent in one
turn of the event loop shares a write. A worker sends only JSON and numbers, so that it cannot make the engine's process
execute code; the worker's setup, in the other direction, is pickled.
"""

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

import orjson

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<BII")
# At most so much is handled in a turn, some 2 ms of requests: a flood at one worker does not delay the engine's steps.
FRAMES_PER_TURN, BYTES_PER_TURN = 16, 128 * 1024  # and what is left of a frame that has begun


class FrameKind(IntEnum):
    """Says what a frame holds, in the order of a worker's life; each is described where it is sent."""

    SETUP = 1  # to a worker
    READY = 2
    UPDATE = 3  # to a worker
    UPDATED = 4
    GENERATE = 5
    ADMITTED = 6  # to a worker
    REFUSED = 7  # to a worker
    TOKENS = 8  # to a worker
    STREAM_FAILED = 9  # to a worker
    FAIL = 10  # to a worker
    STOP = 11
    CLOSE = 12
    ENDED = 13
    ASK = 14
    ANSWER = 15  # to a worker
    CLOSE_CHARGE = 16
    SUSPECT = 17  # to a worker
    STATS = 18
    DRAIN = 19  # to a worker
    END = 20  # to a worker
    LOGPROBS = 21  # to a worker
    CANCEL = 22


_KINDS = {kind.value: kind for kind in FrameKind}  # a look-up takes a tenth of the instructions of a call to the enum


Receiver = Callable[[FrameKind, Any, memoryview], object]


class WorkerLink(asyncio.Protocol):
    """One end of the socket. `receive` is called with each frame, whose binary part is valid during the call only, and
    `lost` once the other end is gone.
    """

    def __init__(self, receive: Receiver, lost: Callable[[], object]) -> None:
        self._receive = receive
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pending: list[bytes] = []
        self._received = deque[bytes]()  # the beginning of a frame first
        self._missing = _HEADER.size  # bytes until a frame can be whole
        self._is_handling = False  # a frame is whole: it is handled in the next turn, and reading is paused

    def send(self, kind: FrameKind, message: Any = None, binary: bytes = b"") -> None:
        """Send a frame at the end of this turn of the event loop; dropped if the other end has gone."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(frame(kind, message, binary))

    def close(self) -> None:
        """Send what is pending and close the socket."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once: the other end counts as gone."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._missing -= len(data)
        if self._missing <= 0 and not self._is_handling:  # joined only then: a large frame comes in many parts
            self._handle()

    def _handle(self) -> None:
        """Handle a few frames now, and the rest in later turns; nothing more is read meanwhile.

        Once the other end is lost and its requests are ended, further frames are dropped.
        """
        if self._transport is None:
            return
        data = b"".join(self._received)
        self._received.clear()
        try:
            rest = data[self._handle_some(data) :]
        except Exception:
            log.exception("a frame could not be handled: its link is closed", extra={"discreet": True})
            self.abort()
            return
        self._received.append(rest)
        self._missing = _frame_size(rest) - len(rest)
        was_handling, self._is_handling = self._is_handling, self._missing <= 0
        if self._is_handling:
            self._loop.call_soon(self._handle)
        if was_handling != self._is_handling:
            (self._transport.pause_reading if self._is_handling else self._transport.resume_reading)()

    def _handle_some(self, data: bytes) -> int:
        """Handle a few frames, and return their length in bytes."""
        offset = 0
        with memoryview(data) as view:
            for _ in range(FRAMES_PER_TURN):
                size = self._handle_one(view[offset:])
                offset += size
                if not size or offset >= BYTES_PER_TURN:
                    break
        return offset

    def _handle_one(self, view: memoryview) -> int:
        """Handle the first frame of the view and return its size; 0 if it is incomplete."""
        end = _frame_size(view)
        if end > len(view):
            return 0
        kind, message_size, _ = _HEADER.unpack_from(view)
        middle = _HEADER.size + message_size
        message = orjson.loads(view[_HEADER.size : middle]) if message_size else None
        self._receive(_KINDS[kind], message, view[middle:end])
        return end

    def _flush(self) -> None:
        data, self._pending = b"".join(self._pending), []
        if data and self._transport is not None:
            self._transport.write(data)


def frame(kind: FrameKind, message: Any = None, binary: bytes = b"") -> bytes:
    """Returns the bytes of a frame. A lone surrogate in a text becomes "?"."""
    encoded = b"" if message is None else _dumps(message)
    return b"".join((_HEADER.pack(kind, len(encoded), len(binary)), encoded, binary))


def read_frame(sock: socket.socket) -> tuple[FrameKind, bytes]:
    """Read one frame from a blocking socket, which has no message; returns its kind and its binary part. Raises
    `EOFError` if the other end is gone.
    """
    kind, message_size, binary_size = _HEADER.unpack(_read_exactly(sock, _HEADER.size))
    assert not message_size
    return FrameKind(kind), _read_exactly(sock, binary_size)


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _frame_size(data: bytes | memoryview) -> int:
    """The size of the frame at the beginning of the data; that of a header until there is one."""
    if len(data) < _HEADER.size:
        return _HEADER.size
    _, message_size, binary_size = _HEADER.unpack_from(data)
    size: int = _HEADER.size + message_size + binary_size
    return size


def _dumps(message: Any) -> bytes:
    try:
        return orjson.dumps(message)
    except TypeError:
        return orjson.dumps(_encodable(message))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value
