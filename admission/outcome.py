"""How a request ends. Exactly one `Outcome` each; what led to a refusal travels in the exception.

Refused
└── QueueFull        as many requests wait as the queue may hold: ours, not the tenant's doing
"""

from enum import StrEnum


class Outcome(StrEnum):
    COMPLETED = "completed"  # every token was delivered
    INVALID = "invalid"  # it could never run: malformed, unknown model, too long
    REFUSED = "refused"  # it could have run at another time
    DISCONNECTED = "disconnected"  # the client went away, or stopped reading
    FAILED = "failed"  # the device or the process failed it


class Refused(Exception):
    """Not admitted now. Nothing was kept of the request and nothing is charged for it."""


class QueueFull(Refused):
    """`waiting` requests are queued already, which is the bound."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests are waiting already, which is as many as the queue holds")
        self.waiting = waiting
