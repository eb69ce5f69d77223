"""Chooses between swapping a block of KV memory to the host and computing it again."""

from admission.step_time import StepTimeModel, prefill_work
from backend.config import EngineConfig


class SwapChoice:
    """A block is worth a copy to the host where that, and the copy back if it is used again, takes less time than
    computing it again would, if it is: by measured times of copies and by the step-time model.
    """

    def __init__(self, config: EngineConfig, model: StepTimeModel) -> None:
        self._copy = config.block_copy_seconds
        self._block_size = config.block_size
        self._model = model

    def swaps(self, probability: float) -> bool:
        """Returns whether a block is to be swapped out that will be used again with this probability."""
        computing = self._model.fitted.marginal(prefill_work(0, self._block_size))
        return self._copy * (1 + probability) < probability * computing
