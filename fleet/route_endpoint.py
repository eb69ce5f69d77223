"""Routes one request: picks a replica, sends the request on, and relays the answer as it comes.

Leaving the scope, also by an error, closes the replica's connection, which ends the request there. A second attempt is
made only if the first was refused for the replica's own reasons, or its connection was lost, before any part of an
answer came. Attempts are charged once, but what else a request makes is made by each that reaches a replica: a request
that makes a file or a batch is repeated only if it reached none.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

import httpx
from starlette.types import Receive, Scope

import gateway.grammar_errors  # noqa: F401 - its errors are found, too
from admission.outcome import Outcome
from fleet.endpoint import Body, FleetEndpoint, FleetServices, outcome_of
from fleet.errors import NoReplica, ReplicaLost
from fleet.prediction import RoutedRequest
from fleet.tracing import AttemptSpan
from fleet.upstream import Headers, answered, forwarded, send_on
from fleet.view import ReplicaView
from gateway import sse
from gateway.anthropic.errors import OVERLOADED
from gateway.batches.endpoints import BODY_SECONDS
from gateway.errors import ApiError, with_subclasses
from gateway.http.request_scope import BodyParts
from gateway.http.responses import ResponseWriter, sends_events
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.reservation import Attempt, Delivered

MAX_ATTEMPTS = 2
PROGRESS_SUFFIX = b" tokens\n\n"  # the end of a replica's progress comment
MAX_PROGRESS_BYTES = 32  # of a progress comment, which may come in two parts
MAX_TAIL_BYTES = 8_192  # behind a progress comment
OWN_REASONS = frozenset({"queue_full", "deadline", "draining", "preempted"})
"""Values of `x-sluice-dropped-reason` in a refusal that another replica might not give."""
UNAVAILABLE = frozenset({503, OVERLOADED})
_OUTCOMES = {kind.code or kind.type: kind.outcome for kind in with_subclasses(ApiError)}
"""Outcomes of streams that end with an error, by its code, or its type where it has no code; others are failures."""


class Relayed(NamedTuple):
    """A whole answer of a replica."""

    status: int
    headers: Headers
    body: bytes


class StreamFailure(NamedTuple):
    """The error event that a replica has ended its stream with, which the client has."""

    outcome: Outcome
    code: str


class SentOn(NamedTuple):
    """One attempt: a request, its replica, its span, and the id shared by all its attempts."""

    request: RoutedRequest
    view: ReplicaView
    span: AttemptSpan
    id: str


class StreamTail:
    """The end of a stream so far, from the replica's last progress comment (`sse.progress`)."""

    __slots__ = ("_tail", "has_begun")

    def __init__(self) -> None:
        self.has_begun = False
        self._tail = b""

    def add(self, part: bytes) -> None:
        self.has_begun = True
        self._tail = (
            self._tail[-MAX_PROGRESS_BYTES:] if PROGRESS_SUFFIX in part else self._tail[-MAX_TAIL_BYTES:]
        ) + part

    @property
    def num_tokens(self) -> int | None:
        """The tokens sent, by the replica's progress comment; None without one."""
        return sse.last_progress(self._tail)

    @property
    def failure(self) -> StreamFailure | None:
        """The replica's error event; None without one."""
        if (error := sse.failure(self._tail)) is None:
            return None
        code = str(error.get("code") or error.get("type"))
        return StreamFailure(_OUTCOMES.get(code, Outcome.FAILED), code)


class RouteEndpoint(FleetEndpoint):
    def __init__(self, services: FleetServices, scope_needed: str, *, is_repeatable: bool) -> None:
        super().__init__(services, scope_needed)
        self._is_repeatable = is_repeatable

    async def _serve(self, scope: Scope, response: ResponseWriter, body: Body, request: RoutedRequest) -> Outcome:
        """Relay the answer of a replica, or of a second one. Raises `ApiError`."""
        fleet, budget, tracing = self._services.fleet, self._services.budget, self._services.tracing
        failure: ApiError | Relayed = NoReplica()
        tried, lost = list[ReplicaView](), None
        request_id = secrets.token_hex(16)
        budget.requested(request.tenant)
        while len(tried) < MAX_ATTEMPTS and not (isinstance(body, UploadParts) and body.parts.size):
            view = fleet.pick(request, [one.name for one in tried])
            if view is None or (tried and not budget.take(request.tenant)):
                break
            if tried:
                tried[-1].retried += 1
            tried.append(view)
            signed = self._services.keys.fleet.header(Attempt(request_id, len(tried)))
            predict, why = partial(fleet.first_token, request, view), _reason(failure) if len(tried) > 1 else None
            with tracing.attempt(view, len(tried), predict, why) as span:
                headers = forwarded(tracing.carried(scope["headers"], span), response.request_id, signed)
                sent_on = SentOn(request, view, span, request_id)
                failed = await self._served(scope, response, headers, body, sent_on)
                span.error = None if failed is None else _reason(failed)
            if isinstance(failed, StreamFailure):
                return failed.outcome
            if failed is None:
                break
            failure, lost = failed, view.name if isinstance(failed, ReplicaLost) else lost
        if lost is not None and not 200 <= response.status < 300:
            self._cut(request, lost, request_id, None)
        if response.started is None:
            if isinstance(failure, ApiError):
                raise failure
            await response.reply(failure.body, failure.status, failure.headers)
        return outcome_of(response.status)

    async def _served(
        self, scope: Scope, response: ResponseWriter, headers: Headers, body: Body, sent_on: SentOn
    ) -> ApiError | Relayed | StreamFailure | None:
        """Relay a replica's answer to the client, or return why another replica may be tried, or the replica's error.

        Raises `ReplicaLost` if an answer had begun, or may have.
        """
        fleet, (request, view, span, request_id) = self._services.fleet, sent_on
        with fleet.attempt(request, view) as attempt:
            try:
                async with asyncio.timeout(None) as opening:
                    attempt.give_up = partial(opening.reschedule, 0.0)
                    try:
                        answer = await send_on(self._services.client, scope, view.replica.url, headers, body)
                    finally:
                        attempt.give_up = None
            except (httpx.TransportError, TimeoutError) as error:
                is_unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                fleet.failed(view, is_unreachable)
                lost = ReplicaLost()
                if is_unreachable or self._is_repeatable:
                    return lost
                span.error = _reason(lost)
                raise lost from None
            span.status, span.first_byte = answer.status_code, self._services.telemetry.clock()
            tail = StreamTail()
            try:
                failed = await self._relay(answer, response, sent_on, tail)
                if isinstance(failed, StreamFailure) and scope["method"] == "GET":
                    return None  # these are the events of a stored response, and its failure
                return failed
            except httpx.TransportError:
                fleet.failed(view, is_unreachable=False)
                self._cut(request, view.name, request_id, tail)
                lost = ReplicaLost()
                span.error = _reason(lost)
                raise lost from None
            finally:
                await answer.aclose()

    async def _relay(
        self, answer: httpx.Response, response: ResponseWriter, sent_on: SentOn, tail: StreamTail
    ) -> Relayed | StreamFailure | None:
        """Relay an answer, in parts as they come, or whole if its length is known; return a refusal that another
        replica might not give, or the error that a stream ends with. A part of an event waits for the rest, for the
        stream may end with an event of ours.
        """
        parts, headers, status = answer.aiter_raw(), answered(answer), answer.status_code
        if "content-length" in answer.headers:
            whole = Relayed(status, headers, b"".join([part async for part in parts]))
            if status in UNAVAILABLE and answer.headers.get("x-sluice-dropped-reason") in OWN_REASONS:
                return whole
            self._services.fleet.answered(sent_on.request, sent_on.view)
            await response.reply(whole.body, status, headers)
            return None
        self._services.fleet.answered(sent_on.request, sent_on.view)
        events = sse.WholeEvents() if sends_events(headers) else None
        async for come in parts:
            part = come if events is None else events.add(come)
            if part:
                tail.add(part)
                await (response.begin(status, headers, part) if response.started is None else response.stream(part))
        if response.started is None:
            await response.begin(status, headers, b"")
        await response.end_stream(b"" if events is None else events.rest)
        return None if events is None else tail.failure

    def _cut(self, request: RoutedRequest, lost: str, request_id: str, tail: StreamTail | None) -> None:
        """Settle a request of a lost replica by the delivered part of its answer; None: nothing."""
        has_begun = tail is not None and tail.has_begun
        delivered = Delivered(request_id, has_begun, tail.num_tokens if tail is not None and has_begun else None)
        self._services.settlements.cut(request.tenant, lost, delivered)


class UploadParts:
    """The body of an upload, which is handed on as it comes, and so to one replica."""

    def __init__(self, parts: BodyParts, record: RequestRecord) -> None:
        self.parts = parts
        self._record = record

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.parts.more:
            part = await self.parts.next()
            self._record.body_bytes = self.parts.size
            yield part


class UploadEndpoint(RouteEndpoint):
    """Routes one upload, whose replica bounds it: files are larger than bodies, and no JSON."""

    async def _read_body(
        self, scope: Scope, receive: Receive, policy: EffectivePolicy, record: RequestRecord
    ) -> tuple[Body, RoutedRequest]:
        parts = BodyParts(scope, receive, sys.maxsize, BODY_SECONDS)
        return UploadParts(parts, record), RoutedRequest(policy.name, 0)


def _reason(failure: ApiError | Relayed | StreamFailure) -> str:
    """The reason of a failed attempt, in one word."""
    if isinstance(failure, ApiError):
        return failure.code or failure.type
    if isinstance(failure, StreamFailure):
        return failure.code
    return dict(failure.headers).get(b"x-sluice-dropped-reason", b"").decode("latin-1")
