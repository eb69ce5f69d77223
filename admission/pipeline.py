"""The steps that are planned and not yet measured: how long they will still take."""

from collections import deque

from admission.step_time import StepTimeModel, StepWork, plain_sum

_FORGET = 1 / 64  # share of the mean step that each replaces


class Pipeline:
    """Steps run one after another; the oldest runs since the one before it ended, or since it was planned.

    `typical` is the running mean of what steps were predicted to take, in seconds; 0 before the first.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._predicted: deque[float] = deque()
        self._started = 0.0
        self.typical = 0.0

    def planned(self, work: StepWork, now: float) -> None:
        if not self._predicted:
            self._started = now
        seconds = self._model.fitted.seconds(work)
        self._predicted.append(seconds)
        self.typical += (_FORGET if self.typical else 1.0) * (seconds - self.typical)

    def completed(self, now: float) -> None:
        self._predicted.popleft()
        self._started = now

    def lost(self) -> None:
        """None of them took place."""
        self._predicted.clear()

    def remaining(self, now: float) -> float:
        """Predicted seconds until the newest is done."""
        return max(0.0, plain_sum(self._predicted) - (now - self._started)) if self._predicted else 0.0
