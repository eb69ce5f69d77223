"""Serves one request by a replica: authenticates it, picks one, sends it on, and hands back the answer as it comes.

Leaving the scope closes the replica's connection, whatever happened, by which the replica ends the request. A second
attempt is made only where the first was refused for reasons of the replica's own, or its connection was lost, before
anything of an answer came.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import httpx
from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from fleet.errors import NoReplica, ReplicaLost
from fleet.fleet import Fleet
from fleet.prediction import Ask
from fleet.retries import RetryBudget
from fleet.upstream import Headers, answered, forwarded, send_on
from fleet.view import ReplicaView
from gateway.api.body_reader import BodyReader
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.errors import ApiError, InternalError, translate
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import ActiveRequests, ClientGone, show_key
from gateway.http.responses import ResponseWriter
from gateway.telemetry.request_record import RequestRecord, Telemetry
from gateway.tenants.auth import KeyRing
from gateway.tenants.effective_policy import EffectivePolicies, EffectivePolicy
from quotas.reservation import Attempt

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
OWN_REASONS = frozenset({"queue_full", "deadline", "draining", "preempted"})
"""What `x-sluice-dropped-reason` says of a 503 that another replica might not give."""


@dataclass(frozen=True, slots=True)
class Frontend:
    """All that serving requests takes."""

    keys: KeyRing
    policies: EffectivePolicies
    telemetry: Telemetry
    active_requests: ActiveRequests
    body_reader: BodyReader
    refusals: RefusalLimiter
    fleet: Fleet
    budget: RetryBudget
    client: httpx.AsyncClient


class Relayed(NamedTuple):
    """A whole answer of a replica."""

    status: int
    headers: Headers
    body: bytes


class RouteEndpoint:
    """A plain ASGI application that has each request answered by a replica; a failure becomes a typed error here."""

    def __init__(self, frontend: Frontend, scope_needed: str = "inference") -> None:
        self._frontend = frontend
        self._scope_needed = scope_needed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telemetry = self._frontend.telemetry
        response = ResponseWriter(scope, send, telemetry.clock)
        record = telemetry.begin(scope, response)
        outcome = Outcome.FAILED
        try:
            outcome = await self._answer(scope, receive, response, record)
        except ClientGone:
            outcome = Outcome.DISCONNECTED
        except Exception as error:
            refusal = record.error = translate(error)
            outcome = refusal.outcome
            if isinstance(refusal, InternalError):
                log.error("a request failed", exc_info=error, extra={"discreet": True})
            await self._refuse(scope, response, record, refusal)
        finally:
            record.status, record.first_byte = response.status, response.started
            telemetry.ended(record, outcome)

    async def _refuse(self, scope: Scope, response: ResponseWriter, record: RequestRecord, refusal: ApiError) -> None:
        frontend = self._frontend
        peer, _ = scope.get("client") or ("", 0)
        seconds = frontend.refusals.count(refusal, record.tenant, record.key, peer, record.body_bytes)
        if seconds and response.started is None:
            await frontend.active_requests.pause(seconds)
        with frontend.active_requests.abort_if_stalled(scope):
            await response.fail(refusal)

    async def _answer(self, scope: Scope, receive: Receive, response: ResponseWriter, record: RequestRecord) -> Outcome:
        frontend = self._frontend
        principal = frontend.keys.authenticate(response.request_header(b"authorization"))
        show_key(scope, principal.tenant)
        record.tenant, record.key = principal.tenant, principal.key_id
        frontend.active_requests.check_open()
        policy = frontend.policies.of(principal)
        policy.require(self._scope_needed)
        read = partial(self._read, policy)
        body, ask = await frontend.body_reader.read(scope, receive, policy.name, policy.key, record, read)
        request_scope = frontend.active_requests.scope(scope, receive, response.send, frontend.telemetry.clock)
        async with request_scope:
            response.send = request_scope.send
            await self._attempt(scope, response, body, ask)
        if request_scope.error is not None:
            raise request_scope.error
        return request_scope.outcome or _outcome_of(response.status)

    def _read(self, policy: EffectivePolicy, body: JsonBody) -> tuple[bytes, Ask]:
        """Return a body, and what the choice goes by."""
        digests, num_bytes = self._frontend.keys.fleet.beginnings(body.raw, policy.cache_scope)
        return body.raw, Ask(policy.name, num_bytes, digests)

    async def _attempt(self, scope: Scope, response: ResponseWriter, body: bytes, ask: Ask) -> None:
        """Have a replica answer, or a second one. Raises `ApiError`."""
        fleet, budget = self._frontend.fleet, self._frontend.budget
        failure: ApiError | Relayed = NoReplica()
        tried: list[str] = []
        request_id = secrets.token_hex(16)
        budget.requested()
        while len(tried) < MAX_ATTEMPTS:
            view = fleet.pick(ask, tried)
            if view is None or (tried and not budget.take()):
                break
            tried.append(view.name)
            signed = self._frontend.keys.fleet.header(Attempt(request_id, len(tried)))
            headers = forwarded(scope["headers"], response.request_id, signed)
            failed = await self._served(scope, response, headers, body, ask, view)
            if failed is None:
                return
            failure = failed
        if isinstance(failure, ApiError):
            raise failure
        await response.reply(failure.body, failure.status, failure.headers)

    async def _served(
        self, scope: Scope, response: ResponseWriter, headers: Headers, body: bytes, ask: Ask, view: ReplicaView
    ) -> ApiError | Relayed | None:
        """Hand a replica's answer to the client, or return why another replica may be asked. Raises `ReplicaLost` where
        none may, because an answer had begun.
        """
        fleet = self._frontend.fleet
        with fleet.attempt(ask, view) as attempt:
            try:
                async with asyncio.timeout(None) as opening:
                    attempt.give_up = partial(opening.reschedule, 0.0)
                    try:
                        answer = await send_on(self._frontend.client, scope, view.replica.url, headers, body)
                    finally:
                        attempt.give_up = None
            except (httpx.TransportError, TimeoutError) as error:
                fleet.failed(view, is_unreachable=isinstance(error, httpx.ConnectError | httpx.ConnectTimeout))
                return ReplicaLost()
            try:
                return await self._relay(answer, response, ask, view)
            except httpx.TransportError:
                fleet.failed(view, is_unreachable=False)
                raise ReplicaLost from None
            finally:
                await answer.aclose()

    async def _relay(
        self, answer: httpx.Response, response: ResponseWriter, ask: Ask, view: ReplicaView
    ) -> Relayed | None:
        """Hand an answer on: in parts as they come, or whole where its length is known; return one that another replica
        might not give.
        """
        parts, headers, status = answer.aiter_raw(), answered(answer), answer.status_code
        if "content-length" in answer.headers:
            whole = Relayed(status, headers, b"".join([part async for part in parts]))
            if status == 503 and answer.headers.get("x-sluice-dropped-reason") in OWN_REASONS:
                return whole
            self._frontend.fleet.answered(ask, view)
            await response.reply(whole.body, status, headers)
            return None
        self._frontend.fleet.answered(ask, view)
        await response.begin(status, headers, await anext(parts, b""))
        async for part in parts:
            await response.stream(part)
        await response.end_stream(b"")
        return None


_OUTCOMES = {429: Outcome.REFUSED, 503: Outcome.REFUSED, 504: Outcome.EXPIRED}


def _outcome_of(status: int) -> Outcome:
    if status < 400:
        return Outcome.COMPLETED
    return _OUTCOMES.get(status, Outcome.INVALID if status < 500 else Outcome.FAILED)
