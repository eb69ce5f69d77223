"""The ends of requests. Each has exactly one `Outcome`; the reason of a refusal is the exception.

AdmissionRefused
├── QueueFull              as much waits, of all tenants together, as the queue may hold for this one
├── TenantQueueFull        as much of the tenant's own waits as it may have waiting
└── DeadlineInfeasible     its first or its last token would come too late
"""

from enum import StrEnum

from admission.scheduling_policy import Excess

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # seconds


class Outcome(StrEnum):
    COMPLETED = "completed"  # every token was delivered
    INVALID = "invalid"  # it could never run: malformed, unknown model, too long
    REFUSED = "refused"  # it could have run at another time
    EXPIRED = "expired"  # its deadline passed before its first token
    DISCONNECTED = "disconnected"  # the client went away, or stopped reading
    FAILED = "failed"  # the device or the process failed it


class AdmissionRefused(Exception):
    """The request is not admitted. The core keeps nothing of it, and nothing is charged for it.

    `retry_after`: the seconds in which, at the slowest recent drain, the request would fit; before jitter, in [1, 60].
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = min(max(retry_after, MIN_RETRY_S), MAX_RETRY_S)


class QueueFull(AdmissionRefused):
    """The shared queue is full, or with `of_class` the queue of the request's class.

    `excess` is the bound that one more request would pass; `waiting` counts all waiting requests.
    """

    def __init__(self, excess: Excess, waiting: int, retry_after: float, of_class: bool = False) -> None:
        super().__init__(f"the {'class' if of_class else 'shared'} queue is full: {excess}", retry_after)
        self.excess, self.waiting, self.of_class = excess, waiting, of_class


class TenantQueueFull(AdmissionRefused):
    """The tenant's own queue is full; `excess` is the bound that one more request would pass."""

    def __init__(self, excess: Excess, retry_after: float) -> None:
        super().__init__(f"the tenant's own queue is full: {excess}", retry_after)
        self.excess = excess


class DeadlineInfeasible(AdmissionRefused):
    """The request would miss its deadline for the first or the last token.

    `estimate`: the expected time of that token, in seconds from now; nine in ten estimates hold. `own_backlog`: the
    deadline could be met if the same tenant had no waiting request. With an estimate within the deadline, the time in
    between belongs to other requests: promised to them, or their tenants' share.
    """

    def __init__(self, what: str, estimate: float, slack: float, own_backlog: bool, retry_after: float) -> None:
        if own_backlog:
            cause = ", for what the same tenant has waiting already"
        else:
            cause = "; others need the time in between" if estimate <= slack else ""
        by = f" and must come in {_shown(slack)}" if slack > 0 else ", and its deadline has passed"
        super().__init__(f"the {what} token is expected in {_shown(estimate)}{by}{cause}", retry_after)
        self.estimate, self.slack, self.own_backlog = estimate, slack, own_backlog


def _shown(seconds: float) -> str:
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1000 * seconds, "ms")
    return f"{float(f'{value:.3g}'):,.15g} {unit}"
