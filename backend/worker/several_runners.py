"""The runners of several models on one device, as one executor: each step is one model's."""

import sys
from collections.abc import Sequence

from backend.scheduler.batch import Batch
from backend.worker.model_runner import LaunchedStep, ModelRunner


class SeveralRunners:
    """Passes each step to the runner of its model. They share the device's stream, the KV memory and the host's."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        self._runners = runners
        for runner in runners:
            if runner.weights is not None:
                runner.before = self._wake
        self.runs_ahead = runners[0].runs_ahead
        self._newest = -1  # step number

    def launch(self, batch: Batch) -> LaunchedStep:
        """As `Executor.launch`: a number that is not above the earlier ones abandons steps of every model."""
        if batch.step <= self._newest:
            for number, runner in enumerate(self._runners):
                if number != batch.model:
                    runner.forget_unfinished()
        self._newest = batch.step if batch.stores else sys.maxsize
        return self._runners[batch.model].launch(batch)

    def _wake(self, batch: Batch) -> None:
        """Have the weights of the step's model in memory, and those of models that sleep from it on given back."""
        for number in batch.asleep:
            if (weights := self._runners[number].weights) is not None:
                weights.sleep()
        if (own := self._runners[batch.model].weights) is not None:
            own.wake()
