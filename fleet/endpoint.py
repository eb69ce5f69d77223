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
from fleet.prediction import RoutedRequest
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
"""The words of `x-sluice-dropped-reason` in a 503 that another replica might not give."""


@dataclass(frozen=True, slots=True)
class RouterServices:
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

    def __init__(self, services: RouterServices, scope_needed: str = "inference") -> None:
        self._services = services
        self._scope_needed = scope_needed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telemetry = self._services.telemetry
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
        services = self._services
        peer, _ = scope.get("client") or ("", 0)
        seconds = services.refusals.count(refusal, record.tenant, record.key, peer, record.body_bytes)
        if seconds and response.started is None:
            await services.active_requests.pause(seconds)
        with services.active_requests.abort_if_stalled(scope):
            await response.fail(refusal)

    async def _answer(self, scope: Scope, receive: Receive, response: ResponseWriter, record: RequestRecord) -> Outcome:
        services = self._services
        principal = services.keys.authenticate(response.request_header(b"authorization"))
        show_key(scope, principal.tenant)
        record.tenant, record.key = principal.tenant, principal.key_id
        services.active_requests.check_open()
        policy = services.policies.of(principal)
        policy.require(self._scope_needed)
        read = partial(self._read, policy)
        body, request = await services.body_reader.read(scope, receive, policy.name, policy.key, record, read)
        request_scope = services.active_requests.scope(scope, receive, response.send, services.telemetry.clock)
        async with request_scope:
            response.send = request_scope.send
            await self._attempt(scope, response, body, request)
        if request_scope.error is not None:
            raise request_scope.error
        return request_scope.outcome or _outcome_of(response.status)

    def _read(self, policy: EffectivePolicy, body: JsonBody) -> tuple[bytes, RoutedRequest]:
        """Return a body, and what the choice goes by."""
        digests, num_bytes = self._services.keys.fleet.beginnings(body.raw, policy.cache_scope)
        return body.raw, RoutedRequest(policy.name, num_bytes, digests)

    async def _attempt(self, scope: Scope, response: ResponseWriter, body: bytes, request: RoutedRequest) -> None:
        """Have a replica answer, or a second one. Raises `ApiError`."""
        fleet, budget = self._services.fleet, self._services.budget
        failure: ApiError | Relayed = NoReplica()
        tried: list[str] = []
        request_id = secrets.token_hex(16)
        budget.requested()
        while len(tried) < MAX_ATTEMPTS:
            view = fleet.pick(request, tried)
            if view is None or (tried and not budget.take()):
                break
            tried.append(view.name)
            signed = self._services.keys.fleet.header(Attempt(request_id, len(tried)))
            headers = forwarded(scope["headers"], response.request_id, signed)
            failed = await self._served(scope, response, headers, body, request, view)
            if failed is None:
                return
            failure = failed
        if isinstance(failure, ApiError):
            raise failure
        await response.reply(failure.body, failure.status, failure.headers)

    async def _served(
        self,
        scope: Scope,
        response: ResponseWriter,
        headers: Headers,
        body: bytes,
        request: RoutedRequest,
        view: ReplicaView,
    ) -> ApiError | Relayed | None:
        """Hand a replica's answer to the client, or return why another replica may be asked. Raises `ReplicaLost` where
        none may, because an answer had begun.
        """
        fleet = self._services.fleet
        with fleet.attempt(request, view) as attempt:
            try:
                async with asyncio.timeout(None) as opening:
                    attempt.give_up = partial(opening.reschedule, 0.0)
                    try:
                        answer = await send_on(self._services.client, scope, view.replica.url, headers, body)
                    finally:
                        attempt.give_up = None
            except (httpx.TransportError, TimeoutError) as error:
                fleet.failed(view, is_unreachable=isinstance(error, httpx.ConnectError | httpx.ConnectTimeout))
                return ReplicaLost()
            try:
                return await self._relay(answer, response, request, view)
            except httpx.TransportError:
                fleet.failed(view, is_unreachable=False)
                raise ReplicaLost from None
            finally:
                await answer.aclose()

    async def _relay(
        self, answer: httpx.Response, response: ResponseWriter, request: RoutedRequest, view: ReplicaView
    ) -> Relayed | None:
        """Hand an answer on: in parts as they come, or whole where its length is known; return one that another replica
        might not give.
        """
        parts, headers, status = answer.aiter_raw(), answered(answer), answer.status_code
        if "content-length" in answer.headers:
            whole = Relayed(status, headers, b"".join([part async for part in parts]))
            if status == 503 and answer.headers.get("x-sluice-dropped-reason") in OWN_REASONS:
                return whole
            self._services.fleet.answered(request, view)
            await response.reply(whole.body, status, headers)
            return None
        self._services.fleet.answered(request, view)
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
