"""Frames between the engine and its grammar processes: a length, then bytes, over a Unix socket that blocks.

What a step asks for and is answered is a row of 32-bit numbers, so that nobody encodes a text for each token. The first
is the number of the question, in the answer as well: one that nobody has waited for is known by it. Then follow:

    [ADMIT, slot, 4 numbers of a key, count, tokens ...]    the slot has a new sequence, which matches this grammar and
                                                            has generated these tokens
    [ROW, slot, start, count, tokens ...]                   the slot's output from `start` on is these tokens; fill the
                                                            mask of the token that follows them

The answer has for each `ROW`, in order: [what came of it, count, tokens ...], of which the tokens are those that the
grammar forces from that place on, the next one first. It ends with the microseconds that it took.
"""

import socket
import struct
from enum import IntEnum

KEY_INTS = 4  # of 32 bits, in the key of a grammar
_LENGTH = struct.Struct("<I")
MOST_BYTES = 1 << 28  # of a frame


class Op(IntEnum):
    """What one part of a step's frame asks for."""

    ADMIT = 1
    ROW = 2


class RowStatus(IntEnum):
    """What came of a row."""

    MASKED = 0
    UNKNOWN = 1  # the grammar is not here (any more)
    NOTHING = 2  # no token may follow
    EXHAUSTED = 3  # it takes more work to say which tokens may follow than a step allows


def send_frame(link: socket.socket, payload: bytes) -> None:
    """Send one frame, and wait until it is taken. Raises `OSError` where nobody takes it."""
    link.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(link: socket.socket) -> bytes:
    """Wait for a frame and return it. Raises `EOFError` at the end of the link, `OSError` where it has broken or takes
    longer than its timeout.
    """
    (length,) = _LENGTH.unpack(_receive(link, _LENGTH.size))
    if length > MOST_BYTES:
        raise OSError(f"a frame of {length} bytes")
    return _receive(link, length)


def _receive(link: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
