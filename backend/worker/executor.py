"""How a planned step becomes tokens: the seam between the planner and a device."""

from typing import Protocol

from backend.errors import MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput


class PendingStep(Protocol):
    """A step the device has been told to compute."""

    def wait(self) -> StepOutput:
        """Block until it is done. Raises `DeviceError` when the device failed, and `MemoryExhausted` as `launch`."""
        ...


class Executor(Protocol):
    """One device. Steps run in the order of their launch; one thread calls it."""

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind those launched before, without waiting for it.

        Raises `MemoryExhausted` when there is no memory for it. Steps launched behind it are then not waited for, and
        the next has its number or a lower one: it stands in its place. So it is when the caller gives up what is in
        flight, wherever it was interrupted, and begins anew with step 0.
        """
        ...


class Lost:
    """A step that could not be launched."""

    def __init__(self, error: MemoryExhausted) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        raise self._error
