"""Plan, compute, account: the engine of a program that has one thread for it."""

from collections import deque

from backend.batch import NO_TOKEN, Batch
from backend.errors import DeviceError, MemoryExhausted
from backend.executor import Executor, Lost, PendingStep
from backend.flight import Delta
from backend.scheduler import Scheduler


class StepLoop:
    """A scheduler, and the device that computes what it plans."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._launched: deque[PendingStep] = deque()

    def step(self) -> list[Delta]:
        """Plan what fits in flight, let the device finish its oldest step, and account for it.

        A step for which there is no memory has no tokens; smaller ones are planned in its place. Raises `DeviceError`,
        and `MemoryExhausted` when there are none that are smaller.
        """
        while not self._is_losing and (batch := self.scheduler.plan()) is not None:
            self._launched.append(self._launch(batch))
        try:
            output = self._launched[0].wait()
        except MemoryExhausted:
            self._launched.clear()
            if not self.scheduler.lost():
                raise
            return []
        self._launched.popleft()
        if NO_TOKEN in output.token_ids:
            raise DeviceError("the model computed no numbers to draw from: its weights or its dtype are at fault")
        return self.scheduler.complete(output)

    @property
    def _is_losing(self) -> bool:
        """Whether the newest step could not be launched: what was planned behind it would be lost with it."""
        return bool(self._launched) and isinstance(self._launched[-1], Lost)

    def _launch(self, batch: Batch) -> PendingStep:
        try:
            return self._executor.launch(batch)
        except MemoryExhausted as error:
            return Lost(error)
