"""Requests with one output token are gathered in a window: dynamic batching, as in Triton Inference Server.

For scoring and classification (`/v1/completions` with max_tokens 1 and log-probabilities). A batch starts when the
waiting requests fill a preferred size, or when the oldest has waited for the longest delay. A batch takes only prompts
of similar length, within the same power of two: a long prompt would delay short ones. Requests with more output tokens
are batched continuously; a window ahead of one in the queue delays it by at most the longest delay.

Waived: every sequence that fits joins any step.
"""

from backend.scheduler.batching import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence

DEFAULT_MAX_DELAY_S = 0.005  # unless configured: a fraction of a step of a large model


class WindowBatching(BatchingRule):
    """Holds requests with one output token back until a batch is full, or the oldest has waited too long."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        delay, sizes = parts.config.max_batch_delay, parts.config.preferred_batch_sizes
        self._delay = DEFAULT_MAX_DELAY_S if delay is None else delay
        self._sizes = sorted(sizes) or [parts.config.max_num_seqs]
        self._groups: dict[int, dict[Sequence, None]] = {}  # by power of two of the prompt, in order of arrival
        self._places: dict[int, int] = {}  # left in this step's batches, by group

    def arrived(self, sequence: Sequence) -> None:
        if sequence.request.max_tokens == 1:
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
        """Return the number of requests of a group that may join now: the largest preferred size that the group fills,
        or all, once the oldest has waited too long.
        """
        due = next(iter(group)).arrival + self._delay
        if now >= due:
            return len(group)
        self.wakes_at = due if self.wakes_at is None else min(self.wakes_at, due)
        return max((size for size in self._sizes if size <= len(group)), default=0)


def _group(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens.bit_length()
