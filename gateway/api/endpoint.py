"""The base of every endpoint: each request gets an answer, whatever happens, and ends in exactly one outcome."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from backend.errors import DeviceError
from gateway.api.refusals import refusal_of
from gateway.api.service import Service
from gateway.errors import ApiError, InternalError, forget_origin
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import ClientGone, show_key
from gateway.http.responses import ResponseWriter
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.errors import QuotaRefused, StoreUnavailable
from quotas.quotas import Grant
from quotas.reservation import Ask

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


def _ids(record: RequestRecord) -> dict[str, str]:
    return {"request_id": record.request_id, "trace_id": record.trace.trace}


class Endpoint:
    """A plain ASGI endpoint. Here, and nowhere else, an exception becomes the error that the client is sent (429 ...),
    and the record of a request begins and ends.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telemetry = self.service.telemetry
        response = ResponseWriter(scope, send, telemetry.clock)
        record = telemetry.begin(scope, response)
        call = Call(scope, receive, send, response, record)
        outcome = Outcome.FAILED
        try:
            outcome = await self.answer(call)
        except ClientGone:
            outcome = Outcome.DISCONNECTED
        except Exception as error:
            refusal = record.error = refusal_of(error)
            outcome = refusal.outcome
            if isinstance(refusal, InternalError) and not isinstance(error, DeviceError):
                log.error("a request failed", exc_info=error, extra={"discreet": True, "fields": _ids(record)})
            forget_origin(refusal)
            await self._delay_refusal(call, refusal)
            with self.service.active_requests.abort_if_stalled(scope):
                await response.fail(refusal)
        finally:
            record.status, record.first_byte = response.status, response.started
            telemetry.ended(record, outcome)

    def authenticate(self, call: Call) -> Principal:
        """Returns who sends the request. Raises `InvalidApiKey`, and `ShuttingDown` once no new request is taken."""
        principal = self.service.keys.authenticate(call.response.request_header(b"authorization"))
        show_key(call.scope, principal.tenant)
        call.record.tenant, call.record.key = principal.tenant, principal.key_id
        call.record.authenticated = self.service.telemetry.clock()
        self.service.active_requests.check_open()
        return principal

    async def read(self, call: Call, principal: Principal, parse: Callable[[JsonBody], T]) -> T:
        """Read the body and return what `parse` makes of it.

        Raises `TooManyRefused` before it is read, and `ApiError` and `ClientGone` while it is.
        """
        limiter = self.service.refusal_limiter
        if principal.tenant in limiter.refused_tenants:
            limiter.check(principal.tenant, principal.key_id)
        return await self.service.body_reader.read(call.scope, call.receive, principal, call.record, parse)

    async def charge(self, call: Call, policy: EffectivePolicy, ask: Ask) -> Grant:
        """Charge `ask` to the limits of the tenant and the key, of whose state the headers tell. Raises as
        `Quotas.reserve`.
        """
        quotas, outage = self.service.quotas, policy.tenant.on_store_outage
        try:
            grant = await quotas.reserve(policy.name, policy.key, policy.charged, ask, outage)
        except QuotaRefused as refusal:
            call.response.add_headers(policy.rate_headers.of(refusal.measure()))
            raise
        call.response.add_headers(policy.rate_headers.of(grant.states))
        return grant

    async def refuse_spent(self, call: Call, policy: EffectivePolicy, ask: Ask, is_certain: bool = True) -> None:
        """Raises `QuotaRefused` if a limit that `ask` would be charged to is spent. A store that does not answer
        refuses nobody. With `is_certain` the store is always asked, otherwise only if it refused the key lately.
        """
        quotas = self.service.quotas
        if not (is_certain or quotas.was_refused(policy.name, policy.key)):
            return
        try:
            await quotas.refuse_spent(policy.name, policy.key, policy.charged, ask)
        except StoreUnavailable as error:
            log.debug("whether a limit is spent is not known: %s", error)
        except QuotaRefused as refusal:
            call.response.add_headers(policy.rate_headers.of(refusal.measure()))
            raise

    async def _delay_refusal(self, call: Call, refusal: ApiError) -> None:
        """Count the refusal, and wait before it is sent if its key, tenant or address receives too many of them."""
        record, length = call.record, call.response.request_header(b"content-length") or b""
        num_bytes = int(length) if length.isdigit() else record.body_bytes
        peer, _ = call.scope.get("client") or ("", 0)
        seconds = self.service.refusal_limiter.count(refusal, record.tenant, record.key, peer, num_bytes)
        if seconds and call.response.started is None:
            await self.service.active_requests.pause(seconds)

    async def answer(self, call: Call) -> Outcome:
        """Send the response and return the outcome, or raise an exception that `refusal_of` translates."""
        raise NotImplementedError
