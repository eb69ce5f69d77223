"""Work beside the steps that the device does in its turn, such as a batch of inputs to embed."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SideJob(Generic[T]):
    """One piece of work. `compute` is called on a device thread; `finish` on the engine's event loop."""

    def __init__(self, compute: Callable[[], T], done: Callable[[T | Exception, float], object]) -> None:
        """`done` is called with the result, or with the error that failed it, and the seconds that it took."""
        self._compute, self._done = compute, done
        self._result: T | Exception = RuntimeError("it was not computed")
        self._elapsed = 0.0

    def wait(self) -> "SideJob[T]":
        began = time.perf_counter()
        try:
            self._result = self._compute()
        except Exception as error:  # noqa: BLE001 - the one who asked hears of it, and the engine goes on
            self._result = error
        self._elapsed = time.perf_counter() - began
        return self

    def finish(self) -> None:
        self._done(self._result, self._elapsed)
