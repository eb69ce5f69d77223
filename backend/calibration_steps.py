"""Calibration steps: shapes by which a fit can separate costs that the steps of a busy engine mix.

A busy engine fills every step: prefill and decode tokens add up to the budget, and contexts grow with the number of
decodes, so that only the sum of their costs can be measured. So an engine computes steps of few and many tokens over
short and long contexts, before it serves, and one at a time while it is idle.
"""

from collections.abc import Sequence
from typing import NamedTuple

from backend.config import EngineConfig

SHORT_CONTEXT_TOKENS = 16  # of context
LONG_CONTEXT_TOKENS = 8192  # the most of context
MAX_CHUNKS_PER_STEP = 16  # chunks in one step
SERIES_RATIO = 4  # the growth from one step of a series to the next


class CalibrationStep(NamedTuple):
    """The shape of a step: decodes over `context` tokens each, and chunks of `length` tokens behind `start` computed
    ones.
    """

    num_decodes: int = 0
    context: int = 0
    num_prefills: int = 0
    start: int = 0
    length: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefills * self.length


CalibrationTimes = Sequence[tuple[CalibrationStep, float]]
"""Calibration steps, each with the seconds that it took."""

Series = list[CalibrationStep]
"""Shapes of one kind, each of at most `SERIES_RATIO` times the work of the one before."""


def calibration_series(config: EngineConfig) -> list[Series]:
    """Return the shapes that this engine can compute, in series of growing work."""
    budget, most = config.max_num_batched_tokens, config.max_num_seqs
    tokens = config.num_blocks * config.block_size
    longest = max(1, min(config.max_model_len - 1, LONG_CONTEXT_TOKENS))
    decodes = _growing(1, most)
    lengths = _growing(min(16, budget, longest), min(budget, longest), 1.5)  # on both sides of a knee
    series = [
        [CalibrationStep(num_prefills=1, length=length) for length in lengths],
        [CalibrationStep(count, min(SHORT_CONTEXT_TOKENS, longest)) for count in decodes],
    ]
    for count in decodes:
        contexts = _growing(
            min(SHORT_CONTEXT_TOKENS, longest), min(longest, max(SHORT_CONTEXT_TOKENS, tokens // count))
        )
        series.append([CalibrationStep(count, context) for context in contexts[1:]])
    for length in {lengths[0]: 0, lengths[len(lengths) // 2]: 0, lengths[-1]: 0}:
        starts = (
            _growing(min(SHORT_CONTEXT_TOKENS, longest), longest - length)
            if longest - length >= SHORT_CONTEXT_TOKENS
            else []
        )
        series.append([CalibrationStep(num_prefills=1, start=start, length=length) for start in starts[1:]])
    together = min(MAX_CHUNKS_PER_STEP, most, budget // lengths[0])
    if longest - lengths[0] >= SHORT_CONTEXT_TOKENS and together > 1:
        starts = _growing(
            SHORT_CONTEXT_TOKENS, min(longest - lengths[0], max(SHORT_CONTEXT_TOKENS, tokens // together))
        )
        series.append([CalibrationStep(0, 0, together, start, lengths[0]) for start in starts[1:]])
    beside = {min(count, most - 1) for count in decodes[1:]}  # decodes beside a prompt
    rooms = [(count, min(lengths[-1], budget - count)) for count in sorted(beside) if 0 < count < budget]
    series.append([CalibrationStep(count, min(SHORT_CONTEXT_TOKENS, longest), 1, 0, room) for count, room in rooms])
    return [each for each in series if each]


def _growing(first: int, last: int, apart: float = SERIES_RATIO) -> list[int]:
    """Return whole numbers from the first to the last, each about `apart` times the one before."""
    found = [first]
    while found[-1] < last:
        found.append(min(last, max(found[-1] + 1, int(found[-1] * apart))))
    return found
