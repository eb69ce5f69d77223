"""Requests of one token of output are gathered for a moment: dynamic batching, as Triton Inference Server's batcher.

For scores and classes (`/v1/completions` with max_tokens 1, and what log-probabilities say of it). A batch starts
when as many requests wait as one of the preferred sizes, or when the oldest has waited for the longest delay. Only
prompts of similar length, within the same power of two, make a batch: a long prompt would delay short ones. A request
with more output tokens is batched continuously, and a window ahead of it in the queue delays it by at most its delay.

Waived is that every sequence that fits joins any step.
"""

from backend.scheduler.batching.rule import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence

DEFAULT_MAX_DELAY_S = 0.005  # seconds, where the configuration says nothing: a fraction of a step of a large model


class WindowBatching(BatchingRule):
    """Holds those of one token of output back until there are enough of them, or the oldest has waited too long."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        delay, sizes = parts.config.max_batch_delay, parts.config.preferred_batch_sizes
        self._delay = DEFAULT_MAX_DELAY_S if delay is None else delay
        self._sizes = sorted(sizes) or [parts.config.max_num_seqs]
        self._groups: dict[int, dict[Sequence, None]] = {}  # by the power of two of their prompts, in order of arrival
        self._places: dict[int, int] = {}  # that are left of the batches which this step takes, by group

    def arrived(self, sequence: Sequence) -> None:
        if sequence.max_tokens == 1:
            self._groups.setdefault(_group(sequence), {})[sequence] = None

    def left(self, sequence: Sequence) -> None:
        group = self._groups.get(_group(sequence))
        if group is not None and sequence in group:
            del group[sequence]
            if not group:
                del self._groups[_group(sequence)]

    def plan(self, scheduled: ScheduledStep) -> None:
        self.wakes_at = None
        self._places.clear()
        super().plan(scheduled)

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        name = _group(sequence)
        group = self._groups.get(name)
        if group is None or sequence not in group:
            return None
        if name not in self._places:
            self._places[name] = self._batch_size(group, scheduled.planned_at)
        if self._places[name]:
            self._places[name] -= 1
            return None
        return WaitReason.PEERS

    def _batch_size(self, group: dict[Sequence, None], now: float) -> int:
        """Return how many of a group may join now: the largest preferred size that they fill, or all, once the oldest
        has waited too long.
        """
        due = next(iter(group)).arrival + self._delay
        if now >= due:
            return len(group)
        self.wakes_at = due if self.wakes_at is None else min(self.wakes_at, due)
        return max((size for size in self._sizes if size <= len(group)), default=0)


def _group(sequence: Sequence) -> int:
    return len(sequence.prompt).bit_length()
