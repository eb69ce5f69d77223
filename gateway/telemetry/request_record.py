"""The record of one request, the source of its log line, metrics, trace and admin page.

Moments are in seconds of the engine's clock, which never goes back; `began_ns` relates them to the calendar. It holds
no prompt, no output and no key. `Telemetry` keeps the records of live requests and notifies listeners of each end.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from random import getrandbits
from typing import NamedTuple, Protocol

from starlette.types import Scope

from admission.outcome import Outcome
from admission.promise import Promise
from admission.request import JudgedRequest
from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import Sequence
from gateway.errors import ApiError
from gateway.http.responses import ResponseWriter
from gateway.key_mask import masked
from gateway.replica.fleet_secret import UNKNOWN, Beginnings
from quotas.policy.policy import GuardrailStage
from quotas.reservation import Reservation, Usage

log = logging.getLogger(__name__)

MAX_STATE_BYTES = 512  # of tracestate; the specification wants at least this much propagated

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


@dataclass(slots=True)
class TraceContext:
    """The ids of a request's span and of its parent, as W3C Trace Context defines them."""

    trace_id: int  # 128 bits, never 0
    span_id: int  # 64 bits, never 0; of our own span
    parent_id: int | None = None  # of the client's
    client_samples: bool = False  # the client's sampling flag
    state: str = ""  # tracestate, handed on as it came

    @property
    def trace(self) -> str:
        """Returns the trace id in hexadecimal, as headers and logs write it."""
        return f"{self.trace_id:032x}"


def trace_context(traceparent: bytes | None, tracestate: bytes | None) -> TraceContext:
    """A span of ours in the client's trace, or in a new one if the header is absent or invalid."""
    span_id = getrandbits(64) or 1
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None:
        return TraceContext(getrandbits(128) or 1, span_id)
    version, trace_id, parent_id, flags, rest = match.groups()
    trace, parent = int(trace_id, 16), int(parent_id, 16)
    if version == b"ff" or (version == b"00" and rest) or not (trace and parent):
        return TraceContext(getrandbits(128) or 1, span_id)
    state = masked(tracestate.decode("latin-1")) if tracestate and len(tracestate) <= MAX_STATE_BYTES else ""
    return TraceContext(trace, span_id, parent, bool(int(flags, 16) & _SAMPLED), state)


MAX_STORE_CALLS = 16
_FAILED = frozenset({Outcome.FAILED, Outcome.EXPIRED})


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, start + length) of a sequence, computed by one step."""

    step: int
    start: int
    length: int
    planned: float


@dataclass(slots=True, eq=False)
class SequenceTimeline:
    """One sequence, and when the engine queued, admitted, computed and released it; None: not yet."""

    sequence: Sequence
    promise: Promise
    queued: float
    admitted: float | None = None  # for the first time
    credit: float | None = None  # its tenant's at admission, in engine seconds for each unit of weight
    was_promoted: bool = False  # admitted before a more urgent one of its tenant, by aging
    prefilled: float | None = None  # its last chunk was computed
    first_token: float | None = None
    ended: float | None = None
    released: float | None = None  # its blocks were free again
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    num_jumped_tokens: int = 0  # output tokens forced by its grammar and accepted together with a sampled token


class Granted(Protocol):
    """The amounts a request may use of its limits; see `Grant`."""

    reservation: Reservation | None
    settlement: asyncio.Future[None] | None


class Cancellable(Protocol):
    """The scope in which a request is served, here or in another process; moments are of the engine's clock."""

    error: ApiError | None  # sent to the client once the request has failed
    ended_early: float | None  # moment at which it was ended from outside
    writing_since: float | None  # last progress of the pending writes

    def fail(self, error: ApiError) -> None:
        """End the request, unless it has ended; the client is sent `error`."""
        ...


@dataclass(slots=True)
class StoreCall:
    """One command to the quota store on behalf of a request."""

    name: str
    began: float
    ended: float
    error: str | None  # the class of the exception that it failed with


class GuardrailVerdict(StrEnum):
    ALLOWED = "allowed"
    REFUSED = "refused"
    FAILED = "failed"  # the guardrail gave none
    CANCELLED = "cancelled"  # the request ended first


class GuardrailCall(NamedTuple):
    """One question to the guardrail of a tenant."""

    stage: GuardrailStage
    began: float
    ended: float
    verdict: GuardrailVerdict


@dataclass(slots=True, eq=False)
class EngineRecord:
    """The engine's part of a request's record: limits and sequences.

    Only the engine's client and its callees write it.
    """

    asked: JudgedRequest | None = None  # charge asked of its tenant's limits
    asked_at: float | None = None
    grammar: Grammar | None = None  # the constraint on its answers
    grammar_wait: float | None = None  # seconds until its grammar was compiled; None: it has none
    beginnings: Beginnings = UNKNOWN  # of its prompt, where a router has sent it
    reserving: float | None = None
    reserved: float | None = None
    settling: float | None = None
    grant: Granted | None = None
    timelines: list[SequenceTimeline] = field(default_factory=list)
    store_calls: list[StoreCall] = field(default_factory=list)  # at most `MAX_STORE_CALLS`
    measure: Callable[[], Usage] | None = None  # the use of a line of a batch, which its batch books
    usage_row: str | None = None  # of the ledger, in which its use is booked

    @property
    def num_output_tokens(self) -> int:
        """The number of generated tokens, delivered or not."""
        return sum([len(timeline.sequence.output) for timeline in self.timelines])

    @property
    def num_preemptions(self) -> int:
        return sum([timeline.sequence.num_preemptions for timeline in self.timelines])

    @property
    def charged(self) -> float:
        """The engine seconds charged to it."""
        return sum([timeline.promise.charged for timeline in self.timelines])

    @property
    def queued(self) -> float | None:
        """The moment at which its first sequence was queued; None if none was."""
        return self.timelines[0].queued if self.timelines else None

    @property
    def admitted(self) -> float | None:
        """The moment at which its last sequence joined a step; None if one never did."""
        joined = [timeline.admitted for timeline in self.timelines if timeline.admitted is not None]
        return max(joined) if joined and len(joined) == len(self.timelines) else None

    @property
    def first_token(self) -> float | None:
        """The moment of the engine's first token of any of its sequences; None before it."""
        first = [one.first_token for one in self.timelines if one.first_token is not None]
        return min(first) if first else None


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from its first byte to its last; its endpoint fills in all but `engine`, and it does not change
    afterwards.
    """

    request_id: str
    method: str
    path: str
    trace: TraceContext
    began: float
    began_ns: int  # Unix nanoseconds
    num_retries: int = 0  # attempts before this one, by the client's count
    session: str | None = None  # that the client counts it to

    # known after authentication and reading the body
    tenant: str | None = None
    key: str | None = None  # its id
    model: str | None = None
    operation: str | None = None  # of the GenAI conventions; None: nothing is generated
    sampling: SamplingParams | None = None  # the client's own
    streams: bool = False
    num_answers: int = 1  # choices for each prompt, which follow one another
    service_class: str | None = None
    policy_version: str | None = None
    response_id: str | None = None
    ignored: tuple[str, ...] = ()  # its ignored fields, by the metric's names

    body_bytes: int = 0  # read so far
    guardrail_calls: list[GuardrailCall] = field(default_factory=list)

    # moments
    authenticated: float | None = None
    body_read: float | None = None
    first_byte: float | None = None
    ended: float | None = None

    # while it is served, and after
    scope: Cancellable | None = None
    engine: EngineRecord = field(default_factory=EngineRecord)

    # at its end
    outcome: Outcome | None = None
    error: ApiError | None = None  # sent to the client
    status: int = 0  # of HTTP; 0: no answer was begun

    def unix_ns(self, moment: float) -> int:
        """Returns a moment on the calendar, in Unix nanoseconds."""
        return self.began_ns + round((moment - self.began) * 1e9)

    @property
    def has_failed(self) -> bool:
        """True if it failed by our fault; statuses of 4xx are the client's."""
        return self.status >= 500 or self.outcome in _FAILED

    @property
    def num_prompt_tokens(self) -> int:
        return sum([timeline.sequence.num_prompt_tokens for timeline in self.engine.timelines[:: self.num_answers]])

    @property
    def num_cached_tokens(self) -> int:
        """The prompt tokens found in the prefix cache."""
        return num_cached_tokens([timeline.sequence for timeline in self.engine.timelines], self.num_answers)


def num_cached_tokens(sequences: list[Sequence], num_answers: int) -> int:
    """Return the prompt tokens found in the prefix cache, each prompt counted once.

    A prompt's `num_answers` sequences follow one another; the one with the fewest hits counts, because the others may
    have found its blocks.
    """
    if num_answers == 1:
        return sum([sequence.num_cached_tokens for sequence in sequences])
    groups = [sequences[first : first + num_answers] for first in range(0, len(sequences), num_answers)]
    return sum([min([sequence.num_cached_tokens for sequence in group]) for group in groups])


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The request that the running task serves; tasks that it starts, such as its settlement, inherit it."""


def record_store_call(name: str, began: float, ended: float, error: Exception | None) -> None:
    """Add a command to the quota store to the record of the current request."""
    record = current.get()
    if record is not None and len(record.engine.store_calls) < MAX_STORE_CALLS:
        failure = None if error is None else type(error).__name__
        record.engine.store_calls.append(StoreCall(name, began, ended, failure))


SESSION_HEADERS = (b"x-sluice-session", b"x-claude-code-session-id", b"session_id", b"x-session-id")
"""The headers that name a session: our own, Claude Code's, Codex's and other agents'; the first given one counts."""
MAX_SESSION_CHARS = 128
SESSION_DIGEST_DIGITS = 12


def session_name(headers: Mapping[bytes, bytes]) -> str | None:
    """The name of a request's session; a digest tells apart names that are too long or hold a key."""
    for name in SESSION_HEADERS:  # a generator takes four times as long, in every request
        if given := headers.get(name):
            break
    else:
        return None
    text = given.decode("latin-1")
    shown = masked(text)
    if shown == text and len(text) <= MAX_SESSION_CHARS:
        return text
    digest = sha256(given).hexdigest()[:SESSION_DIGEST_DIGITS]
    return f"{shown[: MAX_SESSION_CHARS - len(digest) - 1]}~{digest}"


Listener = Callable[[RequestRecord], object]
MAX_TOGETHER = 32  # ended requests


class Together:
    """A listener that passes ended requests on some together: code that has just run takes less than half of the time.

    The first of them is passed to `soon`, which has `flush` called in a while; without it the owner calls `flush`.
    """

    def __init__(self, listener: Listener, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._listener, self._soon = listener, soon
        self._records = deque[RequestRecord]()

    def __call__(self, record: RequestRecord) -> None:
        self._records.append(record)
        if len(self._records) >= MAX_TOGETHER:
            self.flush()
        elif self._soon is not None and len(self._records) == 1:
            self._soon(self.flush)

    def flush(self) -> None:
        """Pass on the requests that have ended."""
        while self._records:
            _tell(self._listener, self._records.popleft())


def _tell(listener: Listener, record: RequestRecord) -> None:
    try:
        listener(record)
    except Exception:
        log.exception("the end of a request was not recorded")


class Telemetry:
    """Keeps the records of live requests, and calls listeners at each end. `clock` is the engine's."""

    def __init__(self, clock: Callable[[], float], unix_ns: Callable[[], int] = time.time_ns) -> None:
        self.clock = clock
        self.live: set[RequestRecord] = set()
        self.on_end: list[Listener] = []
        self._unix_ns = unix_ns

    def begin(self, scope: Scope, response: ResponseWriter) -> RequestRecord:
        """Make the record of a request, which its task and child tasks find in `current`."""
        retries = response.request_headers.get(b"x-stainless-retry-count") or b""
        states = list[bytes]()
        if (parent := response.request_headers.get(b"traceparent")) is not None:  # a state may come in several headers
            states = [value for name, value in scope["headers"] if name == b"tracestate"]
        record = RequestRecord(
            response.request_id.decode(),
            scope["method"],
            masked(scope["path"]),
            trace_context(parent, b",".join(states)),
            self.clock(),
            self._unix_ns(),
            int(retries) if len(retries) < 4 and retries.isdigit() else 0,
            session_name(response.request_headers),
        )
        self.live.add(record)
        current.set(record)
        return record

    def ended(self, record: RequestRecord, outcome: Outcome, at: float | None = None) -> None:
        """Record the end of a request, now or at an earlier moment, and call the listeners.

        A listener's failure is logged and does not reach the client.
        """
        self.live.discard(record)
        record.outcome, record.ended = outcome, self.clock() if at is None else at
        for listener in self.on_end:
            _tell(listener, record)
