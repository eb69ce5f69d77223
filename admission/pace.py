"""How much prefill a step can carry without breaking a promise to those who decode in it."""

from admission.step_time import StepTimeModel, StepWork
from backend.config import EngineConfig


class Pace:
    """Prefill tokens by the tightest time between tokens that is promised to a decode of the step.

    Where nobody is promised anything, prefill gets `prefill_share` of the token budget beside decodes, and all of it
    when nothing decodes. A promise that cannot be kept anyhow still leaves room for one block, so that prompts
    progress.
    """

    def __init__(self, config: EngineConfig, model: StepTimeModel, prefill_share: float = 1.0) -> None:
        if not 0 < prefill_share <= 1:
            raise ValueError(f"prefill_share must be above 0 and at most 1, got {prefill_share}")
        self._budget = config.max_num_batched_tokens
        self._block = config.block_size
        self._share = max(config.block_size, int(prefill_share * config.max_num_batched_tokens))
        self._model = model

    def prefill_room(self, num_decodes: int, decode_context: int, interval: float | None) -> int:
        if num_decodes == 0:
            return self._budget
        if interval is None:
            return self._share
        decodes = StepWork(decode_tokens=num_decodes, decode_context=decode_context)
        return max(self._block, self._most_within(interval, decodes))

    def _most_within(self, interval: float, decodes: StepWork) -> int:
        """The largest chunk with which the step is predicted to last at most `interval` (monotone, so by bisection)."""
        low, high = 0, self._budget
        while low < high:
            middle = (low + high + 1) // 2
            chunk = StepWork(prefill_tokens=middle, prefill_pairs=middle * middle // 2)
            if self._model.fitted.seconds(decodes + chunk) <= interval:
                low = middle
            else:
                high = middle - 1
        return low
