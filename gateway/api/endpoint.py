"""What every endpoint shares: an answer whatever happens, and one outcome."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from backend.errors import DeviceError
from gateway.api.rate_headers import rate_headers
from gateway.api.refusals import refusal_of
from gateway.api.service import Service
from gateway.errors import ApiError, InternalError, forget_origin
from gateway.http.connection import show_key
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import ClientGone
from gateway.http.responses import ResponseWriter
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.errors import QuotaRefused, StoreUnavailable
from quotas.reservation import Ask

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One request as ASGI hands it over, and its answer."""

    scope: Scope
    receive: Receive
    send: Send
    exchange: ResponseWriter
    record: RequestRecord


def _ids(record: RequestRecord) -> dict[str, str]:
    return {"request_id": record.request_id, "trace_id": record.trace.trace}


class Endpoint:
    """A plain ASGI endpoint. Errors become typed answers here, and nowhere else; and here every request is followed."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telemetry = self.service.telemetry
        exchange = ResponseWriter(scope, send, telemetry.clock)
        record = telemetry.begin(scope, exchange)
        call = Call(scope, receive, send, exchange, record)
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
            await self._hold_back(call, refusal)
            with self.service.lives.last_write(scope):
                await exchange.fail(refusal)
        finally:
            record.status, record.first_byte = exchange.status, exchange.started
            telemetry.ended(record, outcome)

    def authenticate(self, call: Call) -> Principal:
        """Who asks. Raises `InvalidApiKey`, and `ShuttingDown` where no new request is taken."""
        principal = self.service.keys.authenticate(call.exchange.header(b"authorization"))
        show_key(call.scope, principal.tenant)
        call.record.tenant, call.record.key = principal.tenant, principal.key_id
        call.record.authenticated = self.service.telemetry.clock()
        self.service.lives.check_open()
        return principal

    async def read(self, call: Call, principal: Principal, parse: Callable[[JsonBody], T]) -> T:
        """What `parse` makes of the body. Raises `ApiError` and `ClientGone`; `TooManyRefused` before it is read."""
        self.service.refused_rate.check(principal.tenant, principal.key_id)
        return await self.service.intake.read(call.scope, call.receive, principal, call.record, parse)

    async def refuse_spent(self, call: Call, policy: EffectivePolicy, ask: Ask, is_certain: bool = True) -> None:
        """Raises `QuotaRefused` where a limit is spent that even `ask` would be charged to, and nothing where the store
        does not answer. The store is asked where it `is_certain` that it should be, else when it has refused the key
        lately.
        """
        quotas = self.service.quotas
        if not (is_certain or quotas.was_refused(policy.name, policy.key)):
            return
        try:
            await quotas.refuse_spent(policy.name, policy.key, policy.charged, ask)
        except StoreUnavailable as error:
            log.debug("whether a limit is spent is not known: %s", error)
        except QuotaRefused as refusal:
            call.exchange.add_headers(rate_headers(refusal.measure()))
            raise

    async def _hold_back(self, call: Call, refusal: ApiError) -> None:
        """Count a refusal; the answers of whoever gets too many wait for their turn."""
        record, length = call.record, call.exchange.header(b"content-length") or b""
        num_bytes = int(length) if length.isdigit() else record.body_bytes
        peer, _ = call.scope.get("client") or ("", 0)
        seconds = self.service.refused_rate.count(refusal, record.tenant, record.key, peer, num_bytes)
        if seconds and call.exchange.started is None:
            await self.service.lives.pause(seconds)

    async def answer(self, call: Call) -> Outcome:
        """Answer, or raise what `gateway.errors.translate` knows."""
        raise NotImplementedError
