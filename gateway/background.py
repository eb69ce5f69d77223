"""Tasks that run beside the server, for as long as it does."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from backend.engine import Engine
from backend.errors import DeviceError
from backend.scheduler.scheduled_step import Flight
from gateway.telemetry.core_observer import WatchedCore

log = logging.getLogger(__name__)


@asynccontextmanager
async def beside(*coroutines: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run them while the block runs. One that ends with an error is logged: nothing else would tell."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(_tell)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task beside the server has ended", exc_info=error)


INTERVAL = 0.25  # seconds between looks
LATE = 1.0  # seconds of lag that are worth a word
PATIENCE = 20  # times as long as was predicted


class Watchdog:
    """Fails an engine when a step has been in flight for `timeout` seconds and for much longer than predicted.

    Time in which the process did not run, because it was stopped, frozen or suspended, is not held against the device.
    """

    def __init__(self, engine: Engine, core: WatchedCore, timeout: float, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._core = core
        self._timeout = timeout
        self._clock = clock
        self._flight: Flight | None = None  # the oldest, at the last look
        self._waited = 0.0  # seconds, for it

    async def run(self) -> None:
        """Runs as long as the engine does."""
        while not self._engine.failed.done():
            slept = self._clock()
            await asyncio.sleep(INTERVAL)
            self.look(self._clock() - slept)

    def look(self, elapsed: float) -> None:
        """Once; `elapsed` seconds after the last look."""
        if (lag := elapsed - INTERVAL) > LATE:
            log.warning("the event loop was late by %.1f s: something held it, or the machine stood still", lag)
        self._look_at_device(min(elapsed, 2 * INTERVAL))

    def _look_at_device(self, elapsed: float) -> None:
        in_flight = self._core.scheduler.in_flight
        oldest = in_flight[0] if in_flight else None
        if oldest is None or oldest is not self._flight:
            self._flight, self._waited = oldest, 0.0
            return
        self._waited += elapsed
        if self._waited >= max(self._timeout, PATIENCE * self._core.predicted(oldest)):
            self._report(oldest)

    def _report(self, flight: Flight) -> None:
        if self._engine.failed.done():
            return
        log.critical(
            "the device is wedged: step %d of %d sequences has not come back for %.0f s\n%s",
            flight.batch.step,
            len(flight.batch.slots),
            self._waited,
            self._engine.device_stacks(),
        )
        self._engine.fail(DeviceError(f"no step was completed for {self._waited:.0f} s"))


Item = TypeVar("Item")
Made = TypeVar("Made")

SLICE = 50  # at a time: some tenths of a millisecond


async def unhurried(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """What `make` makes of each item; other work has its turn after every few. `items` are taken at once."""
    taken = list(items)
    made: list[Made] = []
    for start in range(0, len(taken), SLICE):
        if start:
            await asyncio.sleep(0)
        made += map(make, taken[start : start + SLICE])
    return made
