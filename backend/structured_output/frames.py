"""Messages between the engine and its grammar processes: frames over Unix sockets, and the answers to steps.

A frame is a length, then bytes. A step's question is not sent: it is numbers in shared memory (see `SharedLayout`),
which saves encoding and copies for each token:

    [number of the question, number of slots that are new, number of rows, then for each new slot: slot, 4 numbers of
    its grammar's key, 1 where forced tokens are of use; then for each row: its place in the step, slot, start, length,
    1 if the last token is the newest that its slot has sampled]

A row's mask is filled for the token that follows an output of this length. The tokens of an output before `start` are
unchanged since its last question. A negative number marks a question that is being written. One `StepAnswer` for all
rows is sent; the rest of the answer is in shared memory.
"""

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

KEY_INTS = 4  # of 32 bits, in the key of a grammar
HEAD_INTS = 3
NEW_SLOT_INTS = KEY_INTS + 2
ROW_INTS = 5
_LENGTH = struct.Struct("<I")
_ANSWER = struct.Struct("=iii")
MAX_FRAME_BYTES = 1 << 28  # of a frame


class RowStatus(IntEnum):
    """The result of a row."""

    MASKED = 0
    UNKNOWN = 1  # the process does not have the grammar, or no longer
    NOTHING = 2  # no token may follow
    EXHAUSTED = 3  # the allowed tokens take more work to find than a step may


class StepAnswer(NamedTuple):
    """The result of a step's rows, taken together."""

    number: int  # of the question, by which a late answer is recognised
    num_unmasked: int  # rows that have no mask
    num_jumping: int  # rows with more than one forced token that may be taken at once


def send_frame(link: socket.socket, payload: bytes) -> None:
    """Send one frame, and wait until it is taken. Raises `OSError` if no process receives it."""
    link.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(link: socket.socket) -> bytes:
    """Wait for a frame and return it. Raises `EOFError` at the end of the link, `OSError` if it breaks or its timeout
    passes.
    """
    (length,) = _LENGTH.unpack(_receive(link, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {length} bytes")
    return _receive(link, length)


def send_answer(link: socket.socket, answer: StepAnswer) -> None:
    """Send an answer, and wait until it is taken. Raises `OSError` if no process receives it."""
    link.sendall(_ANSWER.pack(*answer))


def receive_answer(link: socket.socket, number: int) -> StepAnswer:
    """Wait for the answer to a question, and skip the answers to earlier ones. Raises as `receive_frame`."""
    while (answer := StepAnswer._make(_ANSWER.unpack(_receive(link, _ANSWER.size)))).number != number:
        pass
    return answer


def _receive(link: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
