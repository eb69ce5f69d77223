"""W3C trace context: which trace a request belongs to (https://www.w3.org/TR/trace-context/, level 1)."""

import re
from dataclasses import dataclass
from random import getrandbits

MAX_STATE_BYTES = 512  # of tracestate; the specification wants at least this much propagated

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that stands for a request, and whose child it is."""

    trace_id: int  # 128 bits, never 0
    span_id: int  # 64 bits, never 0; of our own span
    parent_id: int | None = None  # of the client's
    client_samples: bool = False  # the client has asked for its trace to be kept
    state: str = ""  # tracestate, handed on as it came

    @property
    def trace(self) -> str:
        """The trace id as it is written."""
        return f"{self.trace_id:032x}"


def trace_context(traceparent: bytes | None, tracestate: bytes | None) -> TraceContext:
    """Our place in the client's trace; a new trace where the header is absent or not valid."""
    span_id = getrandbits(64) or 1
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None:
        return TraceContext(getrandbits(128) or 1, span_id)
    version, trace_id, parent_id, flags, rest = match.groups()
    trace, parent = int(trace_id, 16), int(parent_id, 16)
    if version == b"ff" or (version == b"00" and rest) or not (trace and parent):
        return TraceContext(getrandbits(128) or 1, span_id)
    state = tracestate.decode("latin-1") if tracestate and len(tracestate) <= MAX_STATE_BYTES else ""
    return TraceContext(trace, span_id, parent, bool(int(flags, 16) & _SAMPLED), state)
