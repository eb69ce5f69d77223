"""Server-sent events as bytes (WHATWG HTML, section 9.2)."""

import re
from typing import Any

import orjson

START, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
_PROGRESS = re.compile(rb"(?:^|\n): (\d{1,12}) tokens\n\n")
_FAILURE = re.compile(rb'(?:^|\n)(?:event: error\ndata: |data: (?={"error":))(.*)\n\n')
CONTENT_TYPE = b"text/event-stream"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


def event(data: bytes) -> bytes:
    """Returns one event. `data` is JSON, so it holds no bare line break. Events may be joined into one write."""
    return START + data + END


def named_event(name: str, data: bytes) -> bytes:
    return b"event: %b\n%b" % (name.encode(), event(data))


def progress(num_tokens: int) -> bytes:
    """A progress comment: the number of an answer's tokens sent before it."""
    return b": %d tokens\n\n" % num_tokens


def last_progress(stream: bytes) -> int | None:
    """The number in the last progress comment of a part of a stream; None without one. No event looks like a comment,
    as JSON has no bare line break.
    """
    said = _PROGRESS.findall(stream)
    return int(said[-1]) if said else None


def failure(stream: bytes) -> dict[str, Any] | None:
    """The error, in any dialect, of the error event in the end of a stream; None without one."""
    if (said := _FAILURE.search(stream)) is None:
        return None
    try:
        told = orjson.loads(said[1])
        error: dict[str, Any] = told.get("error", told)
    except (ValueError, AttributeError):
        return {}
    return error if isinstance(error, dict) else {}


class WholeEvents:
    """Cuts a stream behind its events, wherever its parts end: an error that is written next is no part of one."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""  # the beginning of an event

    def add(self, part: bytes) -> bytes:
        """Returns the events, perhaps none, that end with this part."""
        if not self.rest and part.endswith(END):
            return part
        begun, self.rest = len(self.rest), self.rest + part
        end = self.rest.rfind(END, max(0, begun - 1)) + len(END)
        if end < len(END):
            return b""
        events, self.rest = self.rest[:end], self.rest[end:]
        return events
