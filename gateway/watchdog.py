"""Notices a device that no longer answers, and an event loop that is late."""

import asyncio
import logging
from collections.abc import Callable

from admission.controller import Controller
from backend.calibration_steps import CalibrationStep
from backend.engine import Engine
from backend.errors import DeviceError
from backend.scheduler.scheduled_step import ScheduledStep

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25  # between checks
LATE_SECONDS = 1.0  # of lag that are worth a word
PATIENCE_RATIO = 20  # times as long as was predicted


class Watchdog:
    """Fails an engine when a step has been in flight for `timeout` seconds and for much longer than predicted.

    Time in which the process did not run, because it was stopped, frozen or suspended, is not held against the device.
    """

    def __init__(self, engine: Engine, core: Controller, timeout: float, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._core = core
        self._timeout = timeout
        self._clock = clock
        self._oldest: ScheduledStep | CalibrationStep | None = None  # in flight, at the last check
        self._waited = 0.0  # seconds, for it

    async def run(self) -> None:
        """Check every `CHECK_SECONDS` for as long as the engine runs."""
        while not self._engine.failed.done():
            slept = self._clock()
            await asyncio.sleep(CHECK_SECONDS)
            self.check(self._clock() - slept)

    def check(self, elapsed: float) -> None:
        """Check the loop and the device once, `elapsed` seconds after the last check."""
        if (lag := elapsed - CHECK_SECONDS) > LATE_SECONDS:
            log.warning("the event loop was late by %.1f s: something held it, or the machine stood still", lag)
        self._check_device(min(elapsed, 2 * CHECK_SECONDS))

    def _check_device(self, elapsed: float) -> None:
        in_flight = self._core.in_flight
        oldest = in_flight[0] if in_flight else self._engine.calibrating
        if oldest is None or oldest is not self._oldest:
            self._oldest, self._waited = oldest, 0.0
            return
        self._waited += elapsed
        predicted = self._core.predicted(oldest) if isinstance(oldest, ScheduledStep) else 0.0
        if self._waited >= max(self._timeout, PATIENCE_RATIO * predicted):
            self._report(oldest)

    def _report(self, step: ScheduledStep | CalibrationStep) -> None:
        if self._engine.failed.done():
            return
        what = f"a step of {step.num_tokens} tokens, for its time,"
        if isinstance(step, ScheduledStep):
            what = f"step {step.batch.step} of {len(step.batch.slots)} sequences"
        log.critical(
            "the device is wedged: %s has not come back for %.0f s\n%s",
            what,
            self._waited,
            self._engine.device_stacks(),
        )
        self._engine.fail(DeviceError(f"no step was completed for {self._waited:.0f} s"))
