"""The choice between swapping a block of KV memory to the host and computing it again."""

from enum import StrEnum

from admission.step_times.step_time import StepTimeModel
from backend.config import EngineConfig


class SwapRule(StrEnum):
    """The rule by which an evicted block is copied to host memory, if there is any."""

    MEASURED = "measured"  # where two copies take less time than recomputing
    ALWAYS = "always"
    NEVER = "never"


class SwapChoice:
    """An evicted block is worth a copy to the host if that copy, and the copy back in case of reuse, take less time
    than recomputing it would, by measured copy times and the step-time model.
    """

    def __init__(self, rule: SwapRule, config: EngineConfig, model: StepTimeModel) -> None:
        self._rule = rule
        self._copy = config.block_copy_seconds
        self._block_size = config.block_size
        self._model = model

    def swaps(self, probability: float, blocks_per_place: int) -> bool:
        """Return True if an evicted block with this probability of reuse is to be swapped out, one of as many that one
        computation fills.
        """
        if self._rule is not SwapRule.MEASURED:
            return self._rule is SwapRule.ALWAYS
        computing = self._model.fitted.of_prefill(0, self._block_size) / blocks_per_place
        return self._copy * (1 + probability) < probability * computing
