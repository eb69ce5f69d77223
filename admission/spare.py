"""The spare class: requests that have what each step leaves, behind all others (`SPARE_CLASS`)."""

from bisect import bisect_right
from collections.abc import Sequence as Listed
from itertools import accumulate

from admission.order import DueOrder, WaitingOrder
from admission.prefill_sizer import PrefillSizer
from admission.step_times.step_time import StepWork
from backend.scheduler.scheduled_step import PrefillBudget
from backend.scheduler.sequence import Sequence

SPARE_DUE_S = 1e9  # behind every other request
SPARE_SHARE = 0.04
"""The share by which the spare class may lengthen a step of others: times between tokens grow by as much at most."""
SPARE_STEP_S = 0.04
"""The longest step of the spare class alone, for which an arrival waits. Its fixed part is a third of it on a GPU."""
SPARE_FIXED_SHARE = 0.1
"""The fixed part of such a step, where it may be shorter: a step ten times as long as one row has little to gain."""


class SpareLast:
    """A `WaitingOrder` of two: the spare class has an order of its own, behind the order of all other requests."""

    def __init__(self, order: WaitingOrder, spare: DueOrder) -> None:
        self.order, self.spare = order, spare
        self._offers_spare = False  # the last head was of the spare class

    def __len__(self) -> int:
        return len(self.order) + len(self.spare)

    def _of(self, sequence: Sequence) -> WaitingOrder:
        return self.spare if sequence.is_spare else self.order

    def due(self, sequence: Sequence) -> float:
        return SPARE_DUE_S + self.spare.due(sequence) if sequence.is_spare else self.order.due(sequence)

    def add(self, sequence: Sequence) -> None:
        self._of(sequence).add(sequence)

    def restore(self, sequence: Sequence) -> None:
        self._of(sequence).restore(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._of(sequence).remove(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._of(sequence).ended(sequence)

    def head(self) -> Sequence | None:
        head = self.order.head()
        self._offers_spare = head is None
        return self.spare.head() if head is None else head

    def hold(self, tenant: str, reason: str | None) -> None:
        """Hold the tenant in the order that offered the last head, and release it in both."""
        if reason is None or not self._offers_spare:
            self.order.hold(tenant, reason)
        if reason is None or self._offers_spare:
            self.spare.hold(tenant, reason)

    def set_time(self, now: float) -> None:
        self.order.set_time(now)
        self.spare.set_time(now)


class SpareSizer:
    """Computes what a step has left beside the decodes of others, in predicted seconds: it may last longer by a share,
    within the tightest interval that they were promised, and no longer than with a newcomer's prompt.
    """

    def __init__(self, sizer: PrefillSizer, share: float = SPARE_SHARE) -> None:
        if not share >= 0:
            raise ValueError(f"spare_share must be at least 0, got {share}")
        self._sizer, self._share = sizer, share

    def step(self, num_others: int, others_context: int, interval: float | None, model: int = 0) -> "TimedSpareStep":
        others = StepWork(decode_tokens=num_others, decode_context=others_context)
        times = self._sizer.models[model].fitted
        if not num_others:
            seconds = min(SPARE_STEP_S, times.seconds(StepWork(decode_tokens=1)) / SPARE_FIXED_SHARE)
            return TimedSpareStep(self._sizer, others, seconds, model)
        alone = times.seconds(others)
        seconds = min((1 + self._share) * alone, times.seconds(others.with_prefill(0, self._sizer.most_tokens)))
        if interval is not None:
            seconds = min(seconds, max(alone, self._sizer.seconds_within(interval, alone, model)))
        return TimedSpareStep(self._sizer, others, seconds, model)


class TimedSpareStep:
    """The part of a step of `seconds` that is left beside the decodes of others."""

    def __init__(self, sizer: PrefillSizer, others: StepWork, seconds: float, model: int) -> None:
        self._sizer, self._others, self._seconds, self._model = sizer, others, seconds, model
        self._times = sizer.models[model].fitted

    def num_decodes(self, contexts: Listed[int]) -> int:
        sums = [0, *accumulate(contexts)]
        most = bisect_right(range(1, len(sums)), self._seconds, key=lambda count: self._lasts(count, sums[count]))
        return most if self._others.decode_tokens else max(min(1, len(contexts)), most)

    def _lasts(self, num_decodes: int, decode_context: int) -> float:
        return self._times.seconds(self._with(num_decodes, decode_context))

    def _with(self, num_decodes: int, decode_context: int) -> StepWork:
        others = self._others
        return StepWork(
            decode_tokens=others.decode_tokens + num_decodes, decode_context=others.decode_context + decode_context
        )

    def prefill_budget(self, num_decodes: int, decode_context: int, tokens: int) -> PrefillBudget:
        decodes = self._with(num_decodes, decode_context)
        if not (self._sizer.is_chunked or decodes.decode_tokens):
            return PrefillBudget(tokens)  # a whole prompt takes as long as it does
        least = 0 if decodes.decode_tokens else self._sizer.block_size
        return self._sizer.timed(decodes, self._seconds, least, tokens, self._model)
