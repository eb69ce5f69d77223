"""The thread that owns the tensors: launch the next step, wait for this one, post its output."""

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from backend.batch import Batch, StepOutput
from backend.executor import Executor, PendingStep

Post = Callable[[StepOutput | BaseException], None]
"""Called on the device thread with each step's output in order, or once with what ended it."""


class DeviceThread:
    """Feeds one executor. Batches go in from any thread, outputs come back through `post` on this one.

    Keeps up to `depth` steps launched, so that the device never waits for the host between two of them.
    """

    def __init__(self, executor: Executor, post: Post, depth: int) -> None:
        self._executor = executor
        self._post = post
        self._depth = depth
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sluice-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def stop(self, timeout: float = 10.0) -> bool:
        """Finish the steps launched and end the thread; False when it is still stuck after `timeout` seconds."""
        self._inbox.put(None)
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must hear of it
            self._post(error)

    def _serve(self) -> None:
        launched: deque[PendingStep] = deque()
        open_ = True
        while open_ or launched:
            while open_ and len(launched) < self._depth:
                try:
                    batch = self._inbox.get(block=not launched)
                except Empty:
                    break
                if batch is None:
                    open_ = False
                else:
                    launched.append(self._executor.launch(batch))
            if launched:
                self._post(launched.popleft().wait())
