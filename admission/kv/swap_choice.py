"""Chooses between swapping a block of KV memory to the host and computing it again."""

from enum import StrEnum

from admission.step_times.step_time import StepTimeModel
from backend.config import EngineConfig


class Swap(StrEnum):
    """The rule by which a block that is given up goes to the host's memory, where there is some."""

    MEASURED = "measured"  # where two copies take less time than computing it again would
    ALWAYS = "always"
    NEVER = "never"


class SwapChoice:
    """By measured times of copies and by the step-time model, a block is worth a copy to the host if that takes less
    time, with the copy back where it is used again, than computing it again then.
    """

    def __init__(self, rule: Swap, config: EngineConfig, model: StepTimeModel) -> None:
        self._rule = rule
        self._copy = config.block_copy_seconds
        self._block_size = config.block_size
        self._model = model

    def swaps(self, probability: float) -> bool:
        """Returns whether a block is to be swapped out that will be used again with this probability."""
        if self._rule is not Swap.MEASURED:
            return self._rule is Swap.ALWAYS
        computing = self._model.fitted.of_prefill(0, self._block_size)
        return self._copy * (1 + probability) < probability * computing
