"""The threads of a device: they launch steps as they are planned, wait for them in turn, and post their output."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from backend.errors import MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput
from backend.worker.executor import Executor, LostStep, PendingStep
from backend.worker.side_job import SideJob

Post = Callable[[StepOutput | SideJob[Any] | BaseException], None]
"""The callback of a device thread: it gets each step's output, or side job, in order, with `MemoryExhausted` in the
place of a lost step, or once the error that ended the thread.
"""

LaunchedEntry = tuple[int, PendingStep | SideJob[Any]]
"""A launched step, and the attempt that it belongs to: a repeated lost step begins the next attempt. A side job belongs
to none, and so is never lost.
"""


class DeviceThread:
    """Feeds one executor. Batches come from any thread; outputs go back through `post`.

    It keeps up to `depth` steps launched. If the device runs ahead, one thread launches and another waits: a step that
    is planned while another runs is launched at once, so that the device never waits for the host between the two.
    Otherwise one thread does both, and a step costs one change of threads less.

    A step that is lost for want of memory silently takes with it every step planned behind it, until a step comes that
    has its number or a lower one.
    """

    def __init__(self, executor: Executor, post: Post, depth: int) -> None:
        self._executor = executor
        self._post = post
        self._inbox: SimpleQueue[Batch | SideJob[Any] | None] = SimpleQueue()
        # accepts a planned step, or a side job, and never blocks
        self.submit: Callable[[Batch | SideJob[Any]], None] = self._inbox.put
        self._launched: SimpleQueue[LaunchedEntry | None] = (
            SimpleQueue()
        )  # from the launching thread to the waiting one
        self._launchable = threading.Semaphore(depth - 1)  # steps behind the step that was launched last
        self._failing = threading.Lock()
        self._failed = False
        parts = {"": self._launch_and_wait}
        if executor.runs_ahead and depth > 1:
            parts = {"-launch": self._launch_ahead, "-wait": self._wait_behind}
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), name=f"sluice-device{name}", daemon=True)
            for name, part in parts.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stacks(self) -> str:
        """Return the stack of each thread, innermost frame last."""
        frames = sys._current_frames()
        named = [(thread.name, frames.get(thread.ident or 0)) for thread in self._threads]
        return "\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in named if frame)

    def drain(self, timeout: float = 10.0) -> bool:
        """Finish the launched steps and end the threads; False if one is still stuck after `timeout` seconds."""
        self._inbox.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - the loop must hear of every error
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Post the first failure, and end the other thread, if there is one."""
        with self._failing:
            first, self._failed = not self._failed, True
        if first:
            self._post(error)
        self._launchable.release()
        self._launched.put(None)

    def _launch_and_wait(self) -> None:
        self._wait(self._launch())

    def _launch_ahead(self) -> None:
        for launched in self._launch():
            self._launched.put(launched)
            self._launchable.acquire()
        self._launched.put(None)

    def _wait_behind(self) -> None:
        self._wait(self._take_launched())

    def _take_launched(self) -> Iterator[LaunchedEntry]:
        while (launched := self._launched.get()) is not None:
            yield launched
            self._launchable.release()  # it was waited for

    def _launch(self) -> Iterator[LaunchedEntry]:
        """Launch each planned step that is not lost, when the next is asked for."""
        # NOTE: numbers rise within an attempt; a number that does not rise begins the next attempt. A step that is lost
        # at its launch ends its attempt here; a step that is lost while it runs ends it in `_wait`, because steps
        # behind it may be launched. A calibration step is an attempt of its own, whose loss takes no planned step with
        # it.
        attempt, newest, is_lost = 0, -1, False
        while (batch := self._inbox.get()) is not None and not self._failed:
            if isinstance(batch, SideJob):
                yield sys.maxsize, batch
                continue
            if batch.step <= newest:
                attempt, is_lost = attempt + 1, False
            newest = batch.step if batch.stores else sys.maxsize
            if not is_lost:
                step = self._try(batch)
                is_lost = isinstance(step, LostStep)
                yield attempt, step

    def _try(self, batch: Batch) -> PendingStep:
        try:
            return self._executor.launch(batch)
        except MemoryExhausted as error:
            return LostStep(error)

    def _wait(self, launched: Iterable[LaunchedEntry]) -> None:
        lost = -1  # the attempt that has failed
        for attempt, step in launched:
            if attempt > lost:
                try:
                    self._post(step.wait())
                except MemoryExhausted as error:
                    lost = attempt
                    self._post(error)
