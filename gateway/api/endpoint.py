"""The base of every endpoint: each request gets an answer, also after an error, and ends in exactly one outcome."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from backend.errors import DeviceError
from gateway.api.engine_client import RequestCharge
from gateway.api.frontend import Frontend
from gateway.api.refusals import refusal_of
from gateway.errors import ApiError, InternalError
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import ClientGone, RequestScope
from gateway.http.responses import JSON_HEADERS, Headers, ResponseWriter
from gateway.openai.foreign_fields import Ignored, ignored_header
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One request as ASGI hands it over, with the writer of its response and the record that telemetry keeps of it."""

    scope: Scope
    receive: Receive
    send: Send
    response: ResponseWriter
    record: RequestRecord


def _forget_origin(error: ApiError) -> None:
    """Drop the error's traceback and causes.

    Their frames hold the request, which holds the error: under overload the garbage collector would stop the loop for
    tens of milliseconds to find these cycles.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _ids(record: RequestRecord) -> dict[str, str]:
    return {"request_id": record.request_id, "trace_id": record.trace.trace}


class Endpoint:
    """A plain ASGI endpoint. Here, and nowhere else, an exception becomes the error that the client is sent (429 ...),
    and the record of a request begins and ends.
    """

    cancelled = Outcome.FAILED  # of a request that is cancelled: by the process, where a client's leaving has a scope

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telemetry = self.frontend.telemetry
        response = ResponseWriter(scope, send, telemetry.clock)
        record = telemetry.begin(scope, response)
        if self.frontend.cors is not None:
            response.add_headers(self.frontend.cors.headers(response.request_headers.get(b"origin")))
        call = Call(scope, receive, send, response, record)
        outcome = self.cancelled
        try:
            outcome = await self.answer(call)
        except ClientGone:
            outcome = Outcome.DISCONNECTED
        except Exception as error:
            refusal = record.error = refusal_of(error)
            outcome = refusal.outcome
            if isinstance(refusal, InternalError) and not isinstance(error, DeviceError):
                log.error("a request failed", exc_info=error, extra={"discreet": True, "fields": _ids(record)})
            _forget_origin(refusal)
            await self._delay_refusal(call, refusal)
            await response.fail(refusal)
        finally:
            record.status, record.first_byte = response.status, response.started
            telemetry.ended(record, outcome)

    def authenticate(self, call: Call) -> Principal:
        """Returns who sends the request. Raises `InvalidApiKey`, and `ShuttingDown` once no new request is taken."""
        principal = self.frontend.keys.authenticate(call.response.credentials)
        if call.response.exchange is not None:
            call.response.exchange.entry.show_key(principal.tenant)
        call.record.tenant, call.record.key = principal.tenant, principal.key_id
        call.record.authenticated = self.frontend.telemetry.clock()
        self.frontend.active_requests.check_open()
        return principal

    async def read(self, call: Call, policy: EffectivePolicy, parse: Callable[[JsonBody], T]) -> T:
        """Read the body and return what `parse` makes of it.

        Raises `TooManyRefused` before it is read, and `ApiError` and `ClientGone` while it is.
        """
        frontend = self.frontend
        if policy.name in frontend.engine.refused_tenants:
            await frontend.engine.check_refusals(policy)
        return await frontend.body_reader.read(call.scope, call.receive, policy.name, policy.key, call.record, parse)

    def tell_ignored(self, call: Call, ignored: Ignored | None, left_out: Sequence[str] = ()) -> None:
        """Report the ignored fields of a request, to the client, the log and the metrics, and to the client the places
        of its schemas in `left_out`.
        """
        if ignored or left_out:
            call.response.add_headers(ignored_header([*(ignored or ()), *left_out]))
        if ignored:
            call.record.ignored = tuple(ignored.values())

    async def charge(self, call: Call, policy: EffectivePolicy, in_passing: bool = False) -> RequestCharge:
        """Charge a request that takes no tokens; the headers tell what is left of its limits."""
        charge = await self.frontend.engine.charge(policy, in_passing)
        call.response.add_headers(charge.headers)
        return charge

    def scoped(self, call: Call) -> RequestScope:
        """The block that serves a request until its client leaves; behind it, `ended` is its outcome."""
        scope = self.frontend.active_requests.scope(call.scope, call.receive, call.send, self.frontend.telemetry.clock)
        call.response.send, call.record.scope = scope.send, scope
        return scope

    async def complete(self, call: Call, body: bytes, status: int = 200, headers: Headers = JSON_HEADERS) -> Outcome:
        """Send a whole response outside of any scope; the connection of a client that does not read it is dropped."""
        await call.response.reply(body, status, headers)
        return Outcome.COMPLETED

    async def _delay_refusal(self, call: Call, refusal: ApiError) -> None:
        """Count the refusal, and wait before it is sent if its key or address receives too many of them."""
        record, (peer, _) = call.record, call.scope.get("client") or ("", 0)
        seconds = 0.0
        with suppress(ApiError, DeviceError):  # an engine that is gone counts nothing
            seconds = await self.frontend.engine.refused(refusal, record.tenant, record.key, peer, record.body_bytes)
        if seconds and call.response.started is None:
            await self.frontend.active_requests.delay(seconds, call.scope, call.receive, call.send)

    async def answer(self, call: Call) -> Outcome:
        """Send the response and return the outcome, or raise an exception that `refusal_of` translates."""
        raise NotImplementedError


class StoredEndpoint(Endpoint):
    """Answers a call about what its tenant has stored. It counts as a request, in passing, and spends no tokens."""

    async def answer(self, call: Call) -> Outcome:
        policy = self.frontend.policy(self.authenticate(call), "inference")
        with closing(await self.charge(call, policy, in_passing=True)) as charge:
            body = orjson.dumps(await self.told(call, policy))
            charge.was_served = True
        return await self.complete(call, body)

    async def told(self, call: Call, policy: EffectivePolicy) -> Any:
        """The answer, as JSON has it. Raises `ApiError`."""
        raise NotImplementedError


class TokensEndpoint(Endpoint):
    """Answers requests that spend tokens of their tenant's limits.

    If a limit of the key is spent, the request is refused before its body is read.
    """

    operation: str  # of the GenAI conventions

    async def serve(self, call: Call, policy: EffectivePolicy) -> Outcome:
        """As `answer`, for a key that may use the engine."""
        raise NotImplementedError

    async def answer(self, call: Call) -> Outcome:
        call.record.operation = self.operation
        policy = self.frontend.policy(self.authenticate(call), "inference")
        try:
            if policy.charged:
                await self.frontend.engine.refuse_unread(policy, call.record.request_id)
            return await self.serve(call, policy)
        except ApiError as error:
            if error.outcome is Outcome.INVALID and call.response.started is None and policy.charged:
                await self.frontend.engine.refuse_spent(policy)
            raise

    def present_policy(self, call: Call) -> EffectivePolicy:
        """The key's policy once its body was read, which may have taken minutes. Raises `InvalidApiKey` if the key was
        revoked meanwhile, and `Forbidden` if it may not use the engine any more.
        """
        return self.frontend.policy(self.frontend.keys.authenticate(call.response.credentials), "inference")
