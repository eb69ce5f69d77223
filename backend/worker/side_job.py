"""A side job is work that the device does in its turn between steps, such as a batch of inputs to embed."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class LaunchedSideWork(Protocol):
    def synchronize(self) -> float: ...


class WorkStream(Protocol):
    def launch(self, work: Callable[[], object], /) -> LaunchedSideWork: ...


class SideJob(Generic[T]):
    """One piece of work. `compute` is called on a device thread; `finish` on the engine's event loop."""

    def __init__(
        self, compute: Callable[[], T], done: Callable[[T | Exception, float], object], stream: WorkStream
    ) -> None:
        """`done` is called with the result, or with the error that failed it, and its seconds on `stream`. The seconds
        exclude the steps before it, which may still run when it is computed.
        """
        self._compute, self._done, self._stream = compute, done, stream
        self._result: T | Exception = RuntimeError("it was not computed")
        self._elapsed = 0.0

    def wait(self) -> "SideJob[T]":
        try:
            self._elapsed = self._stream.launch(self._run).synchronize()
        except Exception as error:  # noqa: BLE001 - the one who asked hears of it, and the engine goes on
            self._result = error
        return self

    def _run(self) -> None:
        try:
            self._result = self._compute()
        except Exception as error:  # noqa: BLE001 - as above, and what it took until then counts
            self._result = error

    def report(self) -> None:
        self._done(self._result, self._elapsed)
