"""What every endpoint shares: an answer whatever happens, and one outcome."""

import logging
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from backend.errors import DeviceError
from gateway.auth import Principal
from gateway.connection import show_key
from gateway.errors import InternalError, forget_origin
from gateway.refusals import refusal_of
from gateway.responses import Exchange
from gateway.scope import ClientGone
from gateway.service import Service
from gateway.telemetry.story import Story

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One request as ASGI hands it over, and its answer."""

    scope: Scope
    receive: Receive
    send: Send
    exchange: Exchange
    story: Story


def _ids(story: Story) -> dict[str, str]:
    return {"request_id": story.request_id, "trace_id": story.trace.trace}


class Endpoint:
    """A plain ASGI endpoint. Errors become typed answers here, and nowhere else; and here every request is followed."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telemetry = self.service.telemetry
        exchange = Exchange(scope, send, telemetry.clock)
        story = telemetry.begin(scope, exchange)
        outcome = Outcome.FAILED
        try:
            outcome = await self.answer(Call(scope, receive, send, exchange, story))
        except ClientGone:
            outcome = Outcome.DISCONNECTED
        except Exception as error:
            refusal = story.error = refusal_of(error)
            outcome = refusal.outcome
            if isinstance(refusal, InternalError) and not isinstance(error, DeviceError):
                log.error("a request failed", exc_info=error, extra={"discreet": True, "fields": _ids(story)})
            forget_origin(refusal)
            with self.service.lives.last_write(scope):
                await exchange.fail(refusal)
        finally:
            story.status, story.first_byte = exchange.status, exchange.started
            telemetry.ended(story, outcome)

    def authenticate(self, call: Call) -> Principal:
        """Who asks. Raises `InvalidApiKey`, and `ShuttingDown` where no new request is taken."""
        principal = self.service.keys.authenticate(call.exchange.header(b"authorization"))
        show_key(call.scope, principal.tenant)
        call.story.tenant, call.story.key = principal.tenant, principal.key_id
        call.story.authenticated = self.service.telemetry.clock()
        self.service.lives.check_open()
        return principal

    async def answer(self, call: Call) -> Outcome:
        """Answer, or raise what `gateway.errors.translate` knows."""
        raise NotImplementedError
