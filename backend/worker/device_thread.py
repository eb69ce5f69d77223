"""Two threads serve the device: one launches steps as they are planned, one waits for them and posts their output."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

from backend.errors import MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput
from backend.worker.executor import Executor, LostStep, PendingStep

Post = Callable[[StepOutput | BaseException], None]
"""This is called on a device thread with each step's output in order, with `MemoryExhausted` in the place of one that
was lost, or once with the error that ended the thread.
"""


class DeviceThread:
    """Feeds one executor. Batches go in from any thread, outputs come back through `post`.

    Keeps up to `depth` steps launched. A step that is planned while another runs is launched at once, not when the
    other is done, so that the device never waits for the host between two of them.

    A step that is lost for want of memory takes all with it that were planned behind it, without a word, until one
    comes that has its number or a lower one.
    """

    def __init__(self, executor: Executor, post: Post, depth: int) -> None:
        self._executor = executor
        self._post = post
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self.submit: Callable[[Batch], None] = self._inbox.put  # takes a step that was planned, and never blocks
        self._launched: SimpleQueue[tuple[int, PendingStep] | None] = SimpleQueue()  # by attempt
        self._launchable = threading.Semaphore(depth)
        self._failing = threading.Lock()
        self._failed = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), name=f"sluice-device-{name}", daemon=True)
            for name, part in (("launch", self._launch), ("wait", self._wait))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stacks(self) -> str:
        """Return the stack of each thread, innermost frame last."""
        frames = sys._current_frames()
        named = [(thread.name, frames.get(thread.ident or 0)) for thread in self._threads]
        return "\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in named if frame)

    def stop(self, timeout: float = 10.0) -> bool:
        """Finish the steps launched and end the threads; False when one is still stuck after `timeout` seconds."""
        self._inbox.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must hear of it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Post the first failure, and let the other thread end."""
        with self._failing:
            first, self._failed = not self._failed, True
        if first:
            self._post(error)
        self._launchable.release()
        self._launched.put(None)

    def _launch(self) -> None:
        attempt, newest, is_lost = 0, -1, False
        while (batch := self._inbox.get()) is not None:
            self._launchable.acquire()
            if self._failed:
                return
            if batch.step <= newest:
                attempt, is_lost = attempt + 1, False
            newest = batch.step
            if is_lost:
                self._launchable.release()
                continue
            step = self._try(batch)
            is_lost = isinstance(step, LostStep)
            self._launched.put((attempt, step))
        self._launched.put(None)

    def _try(self, batch: Batch) -> PendingStep:
        try:
            return self._executor.launch(batch)
        except MemoryExhausted as error:
            return LostStep(error)

    def _wait(self) -> None:
        lost = -1  # the attempt that has failed
        while (launched := self._launched.get()) is not None:
            attempt, step = launched
            if attempt > lost:
                try:
                    self._post(step.wait())
                except MemoryExhausted as error:
                    lost = attempt
                    self._post(error)
            self._launchable.release()
