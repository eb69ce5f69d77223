"""The prefill sizer: the prefill that a step may carry so that its decodes get their tokens in time."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from admission.step_times.step_time import CopyTime, StepTime, StepTimeModel, StepWork, prefill_pairs
from backend.config import EngineConfig
from backend.scheduler.scheduled_step import PrefillBudget

MIN_RELATIVE_ERROR = 0.02  # of a step: its copies are not known before it is planned
CAUTION_MEAN_ERRORS = 2.9
"""The margin of a step's prediction, in mean errors. Of normal errors, with a mean magnitude of 0.80 sigma, 99 % are
below it: 2.33 sigma.
"""
MIN_PREFILL_SHARE = 0.5
"""The share of the time beside the decodes that prefill keeps, however much step times vary. On a shared machine they
vary with other tenants of the machine: less prefill makes no step punctual there, and answers begin later.
"""


LONGEST_STEP_S = 0.25
"""The longest that a step may last for its prefill, and so the longest wait of an arrival for the step in progress. A
512-token step takes 20 to 50 ms on a GPU, and seconds on a CPU, where smaller ones compute as many tokens a second.
"""


class TimedPrefillBudget(PrefillBudget):
    """A prefill budget for a step of at most `seconds`, counting each token's attended context and the block copies
    that make room for it or bring it back.

    At least `least` tokens are granted even where the decodes alone take longer, so that prompts progress.
    """

    def __init__(
        self,
        step: StepWork,
        seconds: float,
        times: StepTime,
        least: int,
        most: int,
        copy_time: CopyTime,
        block_size: int,
        blocks_per_place: int,
    ) -> None:
        super().__init__(most)
        self._step, self._seconds, self._times, self._least = step, seconds, times, least
        self._copy_time, self._block_size, self._blocks_per_place = copy_time, block_size, blocks_per_place
        self._copies: tuple[float, int, float] | None = None  # due, free and rate of `copies`; None: none are made

    def fits(self, start: int, length: int) -> int:
        """Searches for the number of tokens that fit: predicted time is monotone in work."""
        high = max(0, min(length, self.tokens))
        if self._is_in_time(start, high):
            return high
        low = max(0, min(high, self._least))
        if low + 1 >= high or not self._is_in_time(start, low + 1):
            return low  # the time is spent: most chunks behind a full step
        more = range(low + 2, high)
        return low + 1 + bisect_left(more, True, key=lambda tokens: not self._is_in_time(start, tokens))

    def spend(self, start: int, length: int) -> None:
        self._step = self._step.with_prefill(start, length)
        self._least -= length
        self.tokens -= length

    def copies(self, due: float, free: int, rate: float) -> None:
        self._copies = due, free, rate

    def fits_back(self, end: int, blocks: int) -> int:
        """Each block may evict another to the host, and a block behind them is computed."""
        computed = self._step.with_prefill(end, max(0, self._least))
        left = self._seconds - self._times.seconds(computed)
        if self._copying(blocks, blocks) <= left:
            return blocks
        return max(0, bisect_right(range(1, blocks), left, key=lambda count: self._copying(count, count)))

    def _copying(self, blocks: int, back: int = 0) -> float:
        """Return the seconds that copies add to the step with `blocks` more blocks, `back` of them copied back."""
        if self._copies is None:
            return 0.0
        due, free, rate = self._copies
        return self._copy_time.seconds(due + back + rate * max(0, blocks - free))

    def _is_in_time(self, start: int, length: int) -> bool:
        seconds = self._times.seconds(self._step.with_prefill(start, length))
        if self._copies is not None:
            seconds += self._copying(-(-length // self._block_size) * self._blocks_per_place)
        return seconds <= self._seconds


class PrefillSizer:
    """Sizes prefill by the tightest promised token interval among the step's decodes.

    Without a promise, prefill gets `prefill_share` of the token budget beside decodes, all of it without decodes, and a
    step is predicted to last at most `LONGEST_STEP_S`. A promise is kept by 99 % of the steps, as far as their times
    can be predicted: `CAUTION_MEAN_ERRORS`, at the cost of at most half of the prefill that exact times would allow.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: StepTimeModel,
        copy_time: CopyTime,
        prefill_share: float = 1.0,
        others: Sequence[StepTimeModel] = (),
    ) -> None:
        """`others`: the step times of further models, behind those of the first."""
        if not 0 < prefill_share <= 1:
            raise ValueError(f"prefill_share must be above 0 and at most 1, got {prefill_share}")
        self._config = config
        self.block_size, self.is_chunked = config.block_size, config.prefill_chunk is not None
        self.most_tokens = max(config.block_size, int(prefill_share * config.max_num_batched_tokens))
        self.models = [model, *others]
        self.copy_time = copy_time

    def prefill_budget(
        self, num_decodes: int, decode_context: int, interval: float | None, tokens: int, model: int = 0
    ) -> PrefillBudget:
        decodes, times = StepWork(decode_tokens=num_decodes, decode_context=decode_context), self.models[model].fitted
        if interval is None:
            most = min(self.most_tokens, tokens) if num_decodes else tokens
            if not self.is_chunked:
                return PrefillBudget(most)
            seconds = LONGEST_STEP_S
        else:
            most, seconds = tokens, self.seconds_within(interval, times.seconds(decodes), model)
        return self.timed(decodes, seconds, self.block_size, most, model)

    def timed(self, step: StepWork, seconds: float, least: int, most: int, model: int) -> TimedPrefillBudget:
        """Return a budget for a step of a model."""
        times, blocks_per_place = self.models[model].fitted, 1 + self._config.windows_of(model)[0]
        return TimedPrefillBudget(step, seconds, times, least, most, self.copy_time, self.block_size, blocks_per_place)

    def decode_seconds(self, num_decodes: int, decode_context: int, model: int = 0) -> float:
        return self.models[model].fitted.seconds(StepWork(decode_tokens=num_decodes, decode_context=decode_context))

    def draft_seconds(self, start: int, length: int, model: int = 0) -> float:
        _, _, _, context, prefill_context, pairs, _ = self.models[model].fitted.coefficients
        return prefill_context * start + pairs * prefill_pairs(start, length) - context * (start + length)

    def seconds_within(self, interval: float, alone: float, model: int = 0) -> float:
        """Return the predicted seconds of a step that keeps a promised interval, `alone` being those of its decodes."""
        error = max(self.models[model].relative_error, MIN_RELATIVE_ERROR)
        return max(interval / (1 + CAUTION_MEAN_ERRORS * error), alone + MIN_PREFILL_SHARE * (interval - alone))
