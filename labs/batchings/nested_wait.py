"""Answers of unknown length, batched by the length reached so far: nested WAIT, see `fluid`.

An answer that reaches a stage of `STAGE_TOKENS` tokens pauses, with its memory, until the stage is in balance: its
paused answers reach the arrivals per step times the share of answers that get that far. Waiting requests are admitted
by the first threshold, and leave a safety buffer of free memory that grows with the logarithm of the running sequences.
A timer bounds each pause.

Waived: every sequence that fits joins any step; every decode in every step.
"""

from math import log2

from backend.scheduler.batching import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from labs.batchings.fluid import ArrivalRate, StepSeconds
from labs.batchings.running import add_decodes, jumping, prefilling, ready
from labs.batchings.wait import MAX_WAIT_S

STAGE_TOKENS = (32, 128, 512, 2048)  # tokens of an answer at which it pauses


class NestedWait(BatchingRule):
    """Admits by the first threshold, and resumes paused answers by the thresholds of their stages."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._delay = MAX_WAIT_S if parts.config.max_batch_delay is None else parts.config.max_batch_delay
        self._waiting: dict[Sequence, None] = {}  # sequences never admitted, in order of arrival
        self._stages: dict[Sequence, int] = {}  # stages passed by each running sequence
        self._pausing: list[dict[Sequence, float]] = [{} for _ in STAGE_TOKENS]  # by stage: start of each pause
        self._reached = [0] * (len(STAGE_TOKENS) + 1)  # answers that began, and that reached each stage
        self._rate, self._step = ArrivalRate(), StepSeconds()
        self._places = 0

    def arrived(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self._rate.arrived(sequence.arrival)

    def left(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)

    def completed(self, elapsed: float) -> None:
        self._step.completed(elapsed)

    def plan(self, scheduled: ScheduledStep) -> None:
        self.wakes_at = None
        parts, now = self.parts, scheduled.planned_at
        self._stages = {one: self._stage(one) for one in parts.kv_manager.running.values()}
        self._places = self._begin(now)
        decodes = ready(parts, scheduled)
        for sequence in self._pause(decodes, now):
            scheduled.paused[sequence] = WaitReason.PEERS
        going_on = [one for one in decodes if one not in scheduled.paused]
        add_decodes(parts, going_on, scheduled, parts.budget.tokens)
        parts.rows.add_jumps(jumping(parts), scheduled, parts.budget.tokens)
        prompts = prefilling(parts)
        if prompts or parts.waiting:
            parts.plan_prefills(prompts, scheduled)

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        if sequence not in self._waiting:
            return None
        if not self._places:
            return WaitReason.PEERS
        if self.parts.kv_manager.running and self.parts.kv_manager.blocks.num_available < self._buffer():
            return WaitReason.BATCH
        self._places -= 1
        return None

    def _stage(self, sequence: Sequence) -> int:
        """Return the stages that a running sequence has passed, before a preemption included."""
        known = self._stages.get(sequence)
        if known is not None:
            return known
        output = sequence.num_tokens - sequence.num_prompt_tokens
        self._reached[0] += output <= 1
        return sum([output > stage for stage in STAGE_TOKENS])

    def _begin(self, now: float) -> int:
        """Return the number of sequences to admit to this step."""
        if not self._waiting:
            return 0
        threshold = self._threshold(0, now)
        due = next(iter(self._waiting)).arrival + self._delay
        if len(self._waiting) < threshold and due > now:
            self._wake(due)
            return 0
        return threshold

    def _pause(self, ready: list[Sequence], now: float) -> list[Sequence]:
        """Return the decodes that pause at a stage, and resume each stage at its threshold or timer."""
        pausing, before = [dict[Sequence, float]() for _ in STAGE_TOKENS], self._pausing
        for sequence in ready:
            stage = self._stages[sequence]
            if stage < len(STAGE_TOKENS) and sequence.num_tokens - sequence.num_prompt_tokens >= STAGE_TOKENS[stage]:
                pausing[stage][sequence] = before[stage].get(sequence, now)
        for stage, group in enumerate(pausing):
            self._reached[stage + 1] += len(group.keys() - before[stage].keys())
            due = min(group.values(), default=now) + self._delay
            if len(group) >= self._threshold(stage + 1, now) or due <= now:
                self._stages.update(dict.fromkeys(group, stage + 1))
                group.clear()
            elif group:
                self._wake(due)
        self._pausing = pausing
        return [one for group in pausing for one in group]

    def _threshold(self, stage: int, now: float) -> int:
        """Return the sequences of a stage in balance, at least one."""
        come_so_far = self._reached[stage] / max(1, self._reached[0]) if stage else 1.0
        return max(1, round(self._rate.at(now) * self._step.mean * come_so_far))

    def _buffer(self) -> float:
        """Return the free blocks reserved for running sequences."""
        running = len(self.parts.kv_manager.running)
        return log2(1 + running) * self.parts.config.blocks_for(STAGE_TOKENS[0])

    def _wake(self, due: float) -> None:
        self.wakes_at = due if self.wakes_at is None else min(self.wakes_at, due)
