"""Serves one request at the edge of a fleet: authenticates it, reads its body, and refuses it if no replica need see
it.

Subclasses do the rest: a router relays the request, an endpoint picker names a replica.
"""

import asyncio
import logging
from collections.abc import AsyncIterable
from dataclasses import dataclass
from functools import partial

import httpx
from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from fleet.fleet import Fleet
from fleet.prediction import RoutedRequest
from fleet.retries import RetryBudget
from fleet.settlements import Settlements
from fleet.tracing import RouteTracing
from gateway.anthropic.errors import OVERLOADED
from gateway.api.body_reader import BodyReader
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.errors import ApiError, InternalError, translate
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import ActiveRequests, ClientGone, show_key
from gateway.http.responses import ResponseWriter
from gateway.telemetry.request_record import RequestRecord, Telemetry
from gateway.tenants.auth import KeyRing
from gateway.tenants.effective_policy import EffectivePolicies, EffectivePolicy

log = logging.getLogger(__name__)

Body = bytes | AsyncIterable[bytes]


@dataclass(frozen=True, slots=True)
class FleetServices:
    """The services shared by all requests."""

    keys: KeyRing
    policies: EffectivePolicies
    telemetry: Telemetry
    active_requests: ActiveRequests
    body_reader: BodyReader
    refusals: RefusalLimiter
    fleet: Fleet
    budget: RetryBudget
    client: httpx.AsyncClient
    tracing: RouteTracing
    settlements: Settlements


class FleetEndpoint:
    """A plain ASGI application, in which a failure becomes a typed error."""

    def __init__(self, services: FleetServices, scope_needed: str = "inference") -> None:
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
        except asyncio.CancelledError:  # the server dropped the client
            outcome = Outcome.DISCONNECTED
            raise
        except Exception as error:
            refusal = record.error = translate(error)
            outcome = refusal.outcome
            if isinstance(refusal, InternalError):
                log.error("a request failed", exc_info=error, extra={"discreet": True})
            await self._refuse(scope, receive, response, record, refusal)
        finally:
            record.status, record.first_byte = response.status, response.started
            telemetry.ended(record, outcome)

    async def _refuse(
        self, scope: Scope, receive: Receive, response: ResponseWriter, record: RequestRecord, refusal: ApiError
    ) -> None:
        services = self._services
        peer, _ = scope.get("client") or ("", 0)
        seconds = services.refusals.count(refusal, record.tenant, record.key, peer, record.body_bytes)
        if seconds and response.started is None:
            await services.active_requests.delay(seconds, scope, receive, response.send)
        await response.fail(refusal)

    async def _answer(self, scope: Scope, receive: Receive, response: ResponseWriter, record: RequestRecord) -> Outcome:
        services = self._services
        principal = services.keys.authenticate(response.credentials)
        show_key(scope, principal.tenant)
        record.tenant, record.key = principal.tenant, principal.key_id
        services.active_requests.check_open()
        policy = services.policies.of(principal)
        policy.require(self._scope_needed)
        body, request = await self._read_body(scope, receive, policy, record)
        request_scope = services.active_requests.scope(scope, receive, response.send, services.telemetry.clock)
        async with request_scope:
            response.send = request_scope.send
            outcome = await self._serve(scope, response, body, request)
        if request_scope.error is not None:
            raise request_scope.error
        return request_scope.outcome or outcome

    async def _read_body(
        self, scope: Scope, receive: Receive, policy: EffectivePolicy, record: RequestRecord
    ) -> tuple[Body, RoutedRequest]:
        """The body as it is sent on, and the request as the picker sees it. Raises `ApiError` and `ClientGone`."""
        read = partial(self._read, policy)
        return await self._services.body_reader.read(scope, receive, policy.name, policy.key, record, read)

    def _read(self, policy: EffectivePolicy, body: JsonBody) -> tuple[bytes, RoutedRequest]:
        """A body, and the request as the picker sees it."""
        digests, num_bytes = self._services.keys.fleet.beginnings(body.raw, policy.cache_scope)
        return body.raw, RoutedRequest(policy.name, num_bytes, digests)

    async def _serve(self, scope: Scope, response: ResponseWriter, body: Body, request: RoutedRequest) -> Outcome:
        """Answer the request. Raises `ApiError`."""
        raise NotImplementedError


_OUTCOMES = {429: Outcome.REFUSED, 503: Outcome.REFUSED, OVERLOADED: Outcome.REFUSED, 504: Outcome.EXPIRED}


def outcome_of(status: int) -> Outcome:
    if status < 400:
        return Outcome.COMPLETED
    return _OUTCOMES.get(status, Outcome.INVALID if status < 500 else Outcome.FAILED)
