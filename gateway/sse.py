"""Server-sent events as bytes (WHATWG HTML, section 9.2)."""

START, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


def event(data: bytes) -> bytes:
    """Returns one event. `data` is JSON, so it holds no bare line break. Events may be joined into one write."""
    return START + data + END


def comment(text: bytes = b"") -> bytes:
    """Returns a line that clients ignore; it keeps proxies from closing a silent stream."""
    return b": " + text + b"\n\n"
