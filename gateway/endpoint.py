"""What every endpoint shares: an answer whatever happens, and one outcome."""

import logging
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome
from backend.errors import DeviceError
from gateway.errors import InternalError
from gateway.refusals import refusal_of
from gateway.responses import Exchange
from gateway.scope import ClientGone
from gateway.service import Service

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One request as ASGI hands it over, and its answer."""

    scope: Scope
    receive: Receive
    send: Send
    exchange: Exchange


class Endpoint:
    """A plain ASGI endpoint. Errors become typed answers here, and nowhere else."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send)
        outcome = Outcome.FAILED
        try:
            outcome = await self.answer(Call(scope, receive, send, exchange))
        except ClientGone:
            outcome = Outcome.DISCONNECTED
        except Exception as error:
            refusal, outcome = refusal_of(error)
            if isinstance(refusal, InternalError) and not isinstance(error, DeviceError):
                log.error("a request failed", exc_info=error)
            await exchange.fail(refusal)
        finally:
            self.ended(outcome)

    async def answer(self, call: Call) -> Outcome:
        """Answer, or raise what `gateway.errors.translate` knows."""
        raise NotImplementedError

    def ended(self, outcome: Outcome) -> None:
        """Called once for each request, last."""
