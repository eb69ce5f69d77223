"""An executor turns a planned step into tokens; everything above it knows no device."""

from collections import deque
from typing import Protocol

from backend.errors import MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput


class PendingStep(Protocol):
    """A step that the device has been told to compute."""

    def wait(self) -> StepOutput:
        """Block until it is done. Raises `DeviceError` when the device failed, and `MemoryExhausted` as `launch`."""
        ...


class Executor(Protocol):
    """An executor is one device. Steps run in the order of their launch; one thread launches, and one waits."""

    runs_ahead: bool  # whether a step that was launched runs before it is waited for

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind those launched before, without waiting for it.

        Raises `MemoryExhausted` when there is no memory for it. Steps launched behind it are then not waited for, and
        the next has its number or a lower one: it stands in its place. So it is when the caller gives up what is in
        flight, wherever it was interrupted, and begins anew with step 0.
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
        """Queue a step. What is launched behind one that could not be is lost with it."""
        if self._launched and isinstance(self._launched[-1], LostStep):
            return
        try:
            self._launched.append(self._executor.launch(batch))
        except MemoryExhausted as error:
            self._launched.append(LostStep(error))

    def wait(self) -> StepOutput | MemoryExhausted:
        """Return the output of the oldest step. Where there was no memory for it, forget it and those behind it."""
        try:
            output = self._launched[0].wait()
        except MemoryExhausted as error:
            self._launched.clear()
            return error
        self._launched.popleft()
        return output
