"""What every endpoint shares: an answer whatever happens, and one outcome."""

import logging
import random
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from admission.outcome import Outcome, QueueFull
from backend.errors import DeviceError
from gateway.errors import ApiError, InternalError, Overloaded, translate
from gateway.responses import Exchange
from gateway.scope import ClientGone
from gateway.service import Service

log = logging.getLogger(__name__)

QUEUE_RETRY_SECONDS = 1.0


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
        except Exception as error:  # noqa: BLE001 - a client gets an answer whatever happens
            refusal, outcome = _refusal(error)
            await exchange.fail(refusal)
        finally:
            self.ended(outcome)

    async def answer(self, call: Call) -> Outcome:
        """Answer, or raise what `gateway.errors.translate` knows."""
        raise NotImplementedError

    def ended(self, outcome: Outcome) -> None:
        """Called once for each request, last."""


def _refusal(error: Exception) -> tuple[ApiError, Outcome]:
    """What the client is told, and what is counted."""
    match error:
        case QueueFull():
            message = f"The server is busy: {error}. Try again shortly."
            return Overloaded(message, retry_after=QUEUE_RETRY_SECONDS * random.uniform(1, 2)), Outcome.REFUSED
        case DeviceError():
            message = "The engine failed and the server is restarting; send the request again."
            return InternalError(message), Outcome.FAILED
    refusal = translate(error)
    if isinstance(refusal, InternalError):
        log.error("a request failed", exc_info=error)
    return refusal, Outcome.FAILED if refusal.status >= 500 else Outcome.INVALID
