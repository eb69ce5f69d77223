"""Translates every refusal and failure into the client's error; a spent limit into a 429 with its headers.

`endpoint.py` catches them and answers.
"""

import math
import random
from datetime import UTC, datetime

from admission.outcome import AdmissionRefused, DeadlineInfeasible, QueueFull, TenantQueueFull
from backend.errors import DeviceError
from gateway import errors
from gateway.errors import (
    ApiError,
    ConcurrencyExceeded,
    InsufficientQuota,
    InternalError,
    KvQuotaExceeded,
    Overloaded,
    QuotaUnverifiable,
    RateLimited,
    Unsatisfiable,
    translate,
)
from quotas.errors import (
    BudgetSpent,
    ConnectionLost,
    LimitExceeded,
    NeverFits,
    NotSent,
    QuotaError,
    QuotaRefused,
    SessionSpent,
    StoreFault,
    StoreUnavailable,
    StoreUnsuitable,
)
from quotas.policy.limit import Resource
from quotas.policy.units import show_amount, show_wait

QUEUE_RETRY_SECONDS = 1.0
STORE_RETRY_SECONDS = 1.0
_IN_USE: dict[Resource, type[ApiError]] = {
    Resource.CONCURRENT_REQUESTS: ConcurrencyExceeded,
    Resource.QUEUED_REQUESTS: ConcurrencyExceeded,
    Resource.KV_BYTES: KvQuotaExceeded,
}
_REMEDIES = {  # for a request that can never fit, besides a higher limit
    Resource.INPUT_TOKENS: "shorten the prompt, or ",
    Resource.OUTPUT_TOKENS: "lower max_tokens, or ",
    Resource.TOKENS: "lower max_tokens, shorten the prompt, or ",
    Resource.COST: "lower max_tokens, shorten the prompt, or ",
}


_NAMES_IN_LOG: dict[type[QuotaError], str] = {  # these stay, even if a class is renamed
    StoreUnavailable: "StoreUnavailable",
    NotSent: "StoreUnavailable",
    ConnectionLost: "ConnectionLost",
    StoreUnsuitable: "StoreUnsuitable",
    StoreFault: "StoreFault",
}


def name_in_log(error: QuotaError) -> str:
    """The name of the refusal in the event log: the limit's, or why the store could not decide."""
    return error.limit.name if isinstance(error, QuotaRefused) else _NAMES_IN_LOG[type(error)]


def refusal_of(error: Exception) -> ApiError:
    """Returns the error that answers an exception. An unforeseen one becomes an `InternalError`."""
    match error:
        case QuotaError():
            return _of_quota(error)
        case AdmissionRefused():
            return _of_admission(error)
        case DeviceError():
            return InternalError("The engine failed and the server is restarting; send the request again.")
    return translate(error)


def _of_admission(error: AdmissionRefused) -> ApiError:
    wait = _spread(error.retry_after, 2)
    match error:
        case TenantQueueFull():
            message = f"Too many requests of your tenant are waiting: {error.excess}. Try again in {show_wait(wait)}."
            return ConcurrencyExceeded(message, retry_after=wait)
        case DeadlineInfeasible():
            return unmeetable(error, is_relative=True)
    return Overloaded(f"The server is busy: {error}. Try again in {show_wait(wait)}.", retry_after=wait)


def unmeetable(error: DeadlineInfeasible, is_relative: bool) -> ApiError:
    """The refusal of a late request. `is_relative`: the deadline counts from each attempt, so a retry may meet it."""
    message = f"The deadline cannot be met: {error}."
    wait = _spread(error.retry_after, 2)
    return errors.DeadlineUnmeetable(message, math.ceil(1000 * error.estimate), wait, is_relative, error.own_backlog)


def queue_full(error: QueueFull, service_class: str) -> ApiError:
    """The refusal of a full queue; it names the bound: the class's in the policy, or the setting."""
    unit = "requests" if error.excess.unit == "count" else error.excess.unit
    bound = f"classes.{service_class}.queue.{unit}" if error.of_class else "max_waiting"
    wait = _spread(error.retry_after, 2)
    return Overloaded(f"The server is busy: {error} ({bound}). Try again in {show_wait(wait)}.", retry_after=wait)


def _of_quota(error: QuotaError) -> ApiError:
    match error:
        case NeverFits(limit=limit):
            remedy = f"{_REMEDIES.get(limit.resource, '')}have the limit raised"
            message = (
                f"{_figures(error)}, which is more than it ever holds ({show_amount(limit, limit.capacity)}): {remedy}."
            )
            return Unsatisfiable(message, details=_details(error))
        case LimitExceeded(limit=limit, retry_after=wait):
            kind = _IN_USE.get(limit.resource, RateLimited)
            wait = _spread(wait or QUEUE_RETRY_SECONDS, 1.1)
            message = (
                f"{_figures(error)} and {show_amount(limit, error.left)} are left. Try again in {show_wait(wait)}."
            )
            return kind(message, retry_after=wait, details=_details(error))
        case BudgetSpent(limit=limit, resets_at=moment):
            resets = datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
            message = f"{_figures(error)} and {show_amount(limit, error.left)} are left until it resets at {resets}."
            return InsufficientQuota(message, details=_details(error))
        case SessionSpent(limit=limit):
            left = show_amount(limit, error.left)
            message = f"{_figures(error)} and {left} are left of it. Begin another session, or have the limit raised."
            return InsufficientQuota(message, details=_details(error))
    message = "Your quota cannot be verified at the moment. Try again shortly."
    return QuotaUnverifiable(message, retry_after=_spread(STORE_RETRY_SECONDS, 2))


def _figures(error: QuotaRefused) -> str:
    limit = error.limit
    whose = "API key" if limit.owner == "key" else limit.owner
    amount, asked = show_amount(limit, limit.amount), show_amount(limit, error.asked)
    return f"Your {whose}'s limit {limit.label} is {amount}: this request asks for {asked}"


def _details(error: QuotaRefused) -> dict[str, int | float | str]:
    return {
        "limit": error.limit.label,
        "applies_to": error.limit.owner,
        "asked": error.limit.number(error.asked),
        "left": error.limit.number(error.left),
    }


def _spread(seconds: float, most: float) -> float:
    """Returns a time one to `most` times as long, so that clients refused together do not come back together."""
    return seconds * random.uniform(1, most)
