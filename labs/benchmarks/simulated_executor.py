"""A simulated device computes nothing: it answers after the time a step would have taken, with tokens from a rule."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from backend.scheduler.batch import Batch, StepOutput

StepTime = Callable[[Batch], float]
"""Returns the seconds that a step keeps the device busy."""

TokenRule = Callable[[int, int], int]
"""Returns the token id for a slot at a position."""


@dataclass(slots=True)
class SimulatedStep:
    """A step with its place on the device's timeline, in seconds of `time.perf_counter`."""

    output: StepOutput
    done_at: float

    def wait(self) -> StepOutput:
        delay = self.done_at - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        return self.output


class SimulatedExecutor:
    """Runs steps one after the other in real time, as a device would; `idle` is its wait for work in between.

    The wait before the first step after the device has drained counts only when `plan` was late: callers that measure
    idleness keep the device loaded.
    """

    def __init__(
        self,
        step_time: StepTime = lambda batch: 0.0,
        token: TokenRule = lambda slot, position: 0,
        runs_ahead: bool = True,
    ) -> None:
        """`runs_ahead` is False for a device whose steps take no time: none is launched before the last is read."""
        self.runs_ahead = runs_ahead
        self._step_time = step_time
        self._token = token
        self._free_at = time.perf_counter()
        self.busy = 0.0
        self.idle = 0.0

    def launch(self, batch: Batch) -> SimulatedStep:
        elapsed = self._step_time(batch)
        start = max(self._free_at, time.perf_counter())
        self.idle += start - self._free_at
        self.busy += elapsed
        self._free_at = start + elapsed
        ends = [batch.starts[row] + batch.lengths[row] for row in batch.sampled]
        tokens = list(map(self._token, batch.sampled_slots, ends))
        return SimulatedStep(StepOutput(batch.step, tokens, elapsed), self._free_at)
