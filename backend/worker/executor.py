"""An executor turns a planned step into tokens; no code above it knows a device."""

from collections import deque
from typing import Protocol

from backend.errors import MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput


class PendingStep(Protocol):
    """A step that the device was told to compute."""

    def wait(self) -> StepOutput:
        """Block until the step is done. Raises `DeviceError` when the device failed, and `MemoryExhausted` as
        `launch`.
        """
        ...


class Executor(Protocol):
    """An executor is one device. Steps run in the order of their launch; one thread launches, and one waits."""

    runs_ahead: bool  # True if a launched step runs before it is waited for

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind earlier launches, without waiting for it.

        Raises `MemoryExhausted` when there is no memory for it. Steps launched behind it are then not waited for, and
        the next launch has its number or a lower one: it replaces the step. The same holds when the caller gives up the
        steps in flight, at any point, and begins again with step 0.
        """
        ...


class LostStep:
    """A step that could not be launched for want of memory."""

    def __init__(self, error: MemoryExhausted) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        try:
            raise self._error
        finally:
            del self._error  # its traceback has this frame: each would keep the other, and the runner with them


class InlineDevice:
    """Launches and waits for the steps of one executor on its caller's thread; `DeviceThread` has its own threads."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launched: deque[PendingStep] = deque()

    def launch(self, batch: Batch) -> None:
        """Queue a step. Behind a step that failed to launch, it is lost."""
        if self._launched and isinstance(self._launched[-1], LostStep):
            return
        try:
            self._launched.append(self._executor.launch(batch))
        except MemoryExhausted as error:
            self._launched.append(LostStep(error))

    def wait(self) -> StepOutput | MemoryExhausted:
        """Return the output of the oldest step. If there was no memory for it, forget it and the steps behind it."""
        try:
            output = self._launched[0].wait()
        except MemoryExhausted as error:
            self._launched.clear()
            return error
        self._launched.popleft()
        return output
