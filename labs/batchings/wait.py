"""Sequences of one type are admitted together, in batches of the fluid balance: WAIT, see `fluid`.

A type is the power of two of the prompt's length with that of `max_tokens`; the mean length of its answers is learned
from finished ones. A batch of a type is admitted when its waiting sequences reach a threshold, the type's arrivals per
step. Where memory cannot hold all arrivals in balance, admissions are spaced at the rate that it can hold, so that it
never runs out. A timer bounds the delay at low load. Use it with `--admit optimistic`: the rule is an admission test of
its own.

Waived: every sequence that fits joins any step.
"""

from backend.scheduler.batching import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence, SequenceStatus
from labs.batchings.fluid import ArrivalRate, StepSeconds, memory_of

MAX_WAIT_S = 0.05  # longest delay of the oldest sequence of a type
ANSWERS_REMEMBERED = 64  # newest answers of a type


class _Type:
    """The waiting sequences of similar lengths, with their statistics."""

    def __init__(self, sequence: Sequence) -> None:
        self.waiting: dict[Sequence, None] = {}  # in order of arrival
        self.rate = ArrivalRate()
        self.places = 0  # left in this step's batch
        self.prompt = float(sequence.num_prompt_tokens)  # tokens, on average
        self.output = float(sequence.request.max_tokens)  # the same
        self._num_answers = 0

    def arrived(self, sequence: Sequence) -> None:
        self.waiting[sequence] = None
        self.rate.arrived(sequence.arrival)
        self.prompt += (sequence.num_prompt_tokens - self.prompt) / ANSWERS_REMEMBERED

    def answered(self, tokens: int) -> None:
        self._num_answers = min(self._num_answers + 1, ANSWERS_REMEMBERED)
        self.output += (tokens - self.output) / self._num_answers


class Wait(BatchingRule):
    """Admits whole batches of a type."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._delay = MAX_WAIT_S if parts.config.max_batch_delay is None else parts.config.max_batch_delay
        self._memory = parts.config.num_blocks * parts.config.block_size
        self._types: dict[tuple[int, int], _Type] = {}
        self._begun: dict[Sequence, None] = {}  # admitted, end not seen yet
        self._step = StepSeconds()
        self._now = 0.0  # of the last plan
        self._is_scarce = False  # memory is too small for all arrivals in balance
        self._not_before = 0.0  # earliest next admission while memory is scarce

    def arrived(self, sequence: Sequence) -> None:
        self._types.setdefault(_type_of(sequence), _Type(sequence)).arrived(sequence)

    def left(self, sequence: Sequence) -> None:
        one = self._types[_type_of(sequence)]
        one.waiting.pop(sequence, None)
        if sequence.status is SequenceStatus.RUNNING:
            self._begun[sequence] = None
            held = memory_of(1.0, one.prompt, one.output)
            self._not_before = max(self._not_before, self._now) + held / self._memory * self._step.mean

    def completed(self, elapsed: float) -> None:
        self._step.completed(elapsed)

    def plan(self, scheduled: ScheduledStep) -> None:
        self.wakes_at = None
        self._now = scheduled.planned_at
        self._learn()
        needed = sum([memory_of(self._arriving(one), one.prompt, one.output) for one in self._types.values()])
        self._is_scarce = needed > self._memory
        for one in self._types.values():
            one.places = self._batch_size(one) if one.waiting else 0
        super().plan(scheduled)

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        one = self._types.get(_type_of(sequence))
        if one is None or sequence not in one.waiting:
            return None
        if self._is_scarce and self._not_before > self._now:
            self._wake(self._not_before)
            return WaitReason.PEERS
        if not one.places:
            return WaitReason.PEERS
        one.places -= 1
        return None

    def _learn(self) -> None:
        """Record the lengths of newly finished answers."""
        for sequence in [one for one in self._begun if one.status is SequenceStatus.FINISHED]:
            del self._begun[sequence]
            self._types[_type_of(sequence)].answered(len(sequence.output))

    def _arriving(self, one: _Type) -> float:
        """Return the arrivals of a type per step."""
        return one.rate.at(self._now) * self._step.mean

    def _batch_size(self, one: _Type) -> int:
        """Return the number of sequences of a type to admit to this step."""
        threshold = max(1, round(self._arriving(one)))
        due = next(iter(one.waiting)).arrival + self._delay
        if len(one.waiting) < threshold and due > self._now:
            self._wake(due)
            return 0
        return threshold

    def _wake(self, at: float) -> None:
        self.wakes_at = at if self.wakes_at is None else min(self.wakes_at, at)


def _type_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.num_prompt_tokens.bit_length(), sequence.request.max_tokens.bit_length()
