"""What is remembered of one request: from it come its log line, its metrics, its trace and the admin's pages.

Moments are in seconds of the engine's clock, which never goes back; `began_ns` ties them to the calendar. No prompt, no
output and no key is in it.
"""

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import getrandbits

from admission.outcome import Outcome
from backend.scheduler.sequence import Sequence
from gateway.errors import ApiError
from gateway.http.request_scope import RequestScope
from gateway.openai.requests import GenerationRequest
from quotas.quotas import Grant

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


MAX_STORE_CALLS = 16
_FAILED = frozenset({Outcome.FAILED, Outcome.EXPIRED})


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens [start, start + length) of a sequence, which one step computed."""

    step: int
    start: int
    length: int
    planned: float


@dataclass(slots=True, eq=False)
class SequenceTimeline:
    """What the engine did for one sequence."""

    sequence: Sequence
    queued: float
    admitted: float | None = None  # for the first time
    credit: float | None = None  # its tenant's credit then, in the unit of account
    prefilled: float | None = None  # when its last chunk was computed
    first_token: float | None = None
    ended: float | None = None
    released: float | None = None  # when its blocks were free again
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One command that the quota store was given for a request."""

    name: str
    began: float
    ended: float
    error: str | None  # the name of what failed it


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from its first byte to its last; filled in by whoever serves it, read-only once it has ended."""

    request_id: str
    method: str
    path: str
    trace: TraceContext
    began: float
    began_ns: int  # Unix nanoseconds
    num_retries: int = 0  # that the client has made before, as it says

    # once it is known who asks, and for what
    tenant: str | None = None
    key: str | None = None  # its id
    model: str | None = None
    operation: str | None = None  # of the GenAI conventions; None: nothing is generated
    request: GenerationRequest | None = None
    service_class: str | None = None
    policy_version: str | None = None
    response_id: str | None = None

    body_bytes: int = 0  # that have come

    # moments
    authenticated: float | None = None
    body_read: float | None = None
    reserving: float | None = None
    reserved: float | None = None
    settling: float | None = None
    first_byte: float | None = None
    ended: float | None = None

    # while it is served, and after
    scope: RequestScope | None = None
    grant: Grant | None = None
    timelines: list[SequenceTimeline] = field(default_factory=list)
    store_calls: list[StoreCall] = field(default_factory=list)  # at most `MAX_STORE_CALLS`

    # at its end
    outcome: Outcome | None = None
    error: ApiError | None = None  # what the client was told
    status: int = 0  # of HTTP; 0: no answer was begun

    def unix_ns(self, moment: float) -> int:
        """A moment on the calendar, in Unix nanoseconds."""
        return self.began_ns + round((moment - self.began) * 1e9)

    @property
    def has_failed(self) -> bool:
        """Whether it is an error of ours: statuses of 4xx are the client's."""
        return self.status >= 500 or self.outcome in _FAILED

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(timeline.sequence.prompt) for timeline in self.timelines)

    @property
    def num_output_tokens(self) -> int:
        """Generated, delivered or not."""
        return sum(len(timeline.sequence.output) for timeline in self.timelines)

    @property
    def num_preemptions(self) -> int:
        return sum(timeline.sequence.num_preemptions for timeline in self.timelines)

    @property
    def engine_time(self) -> float:
        """What it was charged, in the unit of account: seconds of engine time unless tokens were chosen."""
        return sum(timeline.sequence.charged for timeline in self.timelines)

    @property
    def queued(self) -> float | None:
        """When the first of its sequences began to wait for the engine."""
        return min((timeline.queued for timeline in self.timelines), default=None)

    @property
    def admitted(self) -> float | None:
        """When the last of its sequences joined a step; None: one never did."""
        moments = [timeline.admitted for timeline in self.timelines if timeline.admitted is not None]
        return max(moments, default=None) if len(moments) == len(self.timelines) else None

    @property
    def first_token(self) -> float | None:
        """When the engine had the first token of any of its sequences."""
        return min(
            (timeline.first_token for timeline in self.timelines if timeline.first_token is not None), default=None
        )


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The request for which the running task works; tasks that it starts, such as its settlement, inherit it."""


def record_store_call(name: str, began: float, ended: float, error: Exception | None) -> None:
    """Put down to the current request what the quota store was asked."""
    record = current.get()
    if record is not None and len(record.store_calls) < MAX_STORE_CALLS:
        failure = None if error is None else type(error).__name__
        record.store_calls.append(StoreCall(name, began, ended, failure))
