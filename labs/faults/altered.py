"""`sluice` with one thing switched off, or one way to break it: `python -m labs.faults.altered NAME serve …`.

A scenario that does not fail without what it guards shows nothing. Where no flag switches it off, this does. Its core
is interpreted: a compiled one is not used.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from backend.engine import Engine
from backend.scheduler.batch import Batch
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from fleet.retries import RetryBudget
from gateway.cli.main import main
from gateway.http.request_scope import Exchange
from gateway.telemetry.event_log_file import EventLogFile
from gateway.tenants.live_policy import LivePolicy
from quotas.quotas import Grant
from quotas.store.replica_name import ReplicaName

BLOCKED_SECONDS = 0.3


def without_hangups() -> None:
    """The notice that a client has left goes nowhere, and nor does what is written to it."""
    write = Exchange.write

    def write_or_lose(self: Exchange, data: bytes) -> None:
        if not self._transport.is_closing():
            write(self, data)

    _replace(Exchange, "end", lambda self: None)
    _replace(Exchange, "write", write_or_lose)


def without_settlement() -> None:
    """What was reserved and not used is not returned."""
    _replace(Grant, "settle", lambda self: None)


def without_former_life() -> None:
    """A gateway that starts again has another name in the store, and takes over nothing of its former life."""
    _replace(ReplicaName, "kept_in", classmethod(lambda cls, directory: cls()))


def without_reload() -> None:
    """Edits of the policy's files are not read."""

    async def reload(self: LivePolicy) -> None:
        pass

    _replace(LivePolicy, "reload", reload)


def without_second_attempts() -> None:
    """A router tries each request at one replica only."""
    _replace(RetryBudget, "take", lambda self, tenant: False)


def with_blocking_writes() -> None:
    """The event loop waits for a client that reads slowly."""
    write = Exchange.write

    def write_and_wait(self: Exchange, data: bytes) -> None:
        write(self, data)
        if self._transport.get_write_buffer_size():
            time.sleep(BLOCKED_SECONDS)

    _replace(Exchange, "write", write_and_wait)


def with_calendar() -> None:
    """The engine goes by the time of day, which may jump."""
    _replace(Engine, "__init__", partialmethod(Engine.__init__, clock=time.time))


def without_unlogged_service() -> None:
    """A gateway ends that cannot write its event log."""
    _replace(EventLogFile, "_give_up", lambda self, error: os._exit(1))


def wedging() -> None:
    """The device does not come back from its next step after SIGUSR1."""
    is_wedged = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: is_wedged.set())
    launch = ModelRunner.launch

    def launch_or_wedge(self: ModelRunner, batch: Batch) -> PendingStep:
        if is_wedged.is_set():
            threading.Event().wait()
        return launch(self, batch)

    _replace(ModelRunner, "launch", launch_or_wedge)


def _replace(owner: Any, name: str, method: Any) -> None:
    getattr(owner, name)  # an alteration of something that is gone would alter nothing
    setattr(owner, name, method)


ALTERATIONS: dict[str, Callable[[], None]] = {
    alteration.__name__: alteration
    for alteration in (
        without_hangups,
        without_settlement,
        without_former_life,
        without_reload,
        without_second_attempts,
        with_blocking_writes,
        with_calendar,
        without_unlogged_service,
        wedging,
    )
}

if __name__ == "__main__":
    ALTERATIONS[sys.argv.pop(1)]()
    sys.exit(main())
