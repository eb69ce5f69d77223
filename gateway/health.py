"""What an orchestrator asks of a server: whether to wait for it, to restart it, to send it requests."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """Each is asked anew for every probe. A server that drains is alive and not ready."""

    started: Callable[[], bool]
    alive: Callable[[], bool]
    ready: Callable[[], bool]
