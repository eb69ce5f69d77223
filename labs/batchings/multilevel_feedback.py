"""Least served first: a multi-level feedback queue, as in FastServe (Wu et al., 2023).

A sequence begins on the level whose quantum its prompt fills (skip-join), and sinks one level whenever it has used up
its quantum; each level's quantum is twice the one above. A step computes the first `max_num_seqs / SEQUENCES_PER_ROW`
sequences that hold memory, by level, the earliest on a level first; the others pause, and keep their memory. A newly
admitted sequence has its first chunk computed at once. A sequence passed over for `STARVATION_S` seconds begins anew on
the first level. The paper counts seconds and swaps the memory of paused sequences; here a quantum counts computed
tokens, since a batch's rows share its time, and memory stays.

Waived: every decode in every step, and with it the promised times between tokens.
"""

from backend.scheduler.batching import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from labs.batchings.running import add_decodes, jumping, prefilling, ready

FIRST_QUANTUM_TOKENS = 64  # tokens, of the first level
SEQUENCES_PER_ROW = 4  # sequences that hold memory, for each row of a step
STARVATION_S = 0.5  # seconds


class MultilevelFeedback(BatchingRule):
    """Computes the sequences of the first levels, and pauses the others."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._rows = max(1, parts.config.max_num_seqs // SEQUENCES_PER_ROW)
        self._jobs: dict[Sequence, _Job] = {}  # of the running sequences

    def plan(self, scheduled: ScheduledStep) -> None:
        parts, now = self.parts, scheduled.planned_at
        jobs = {s: self._jobs.get(s) or _Job(s, now) for s in parts.kv_manager.running.values()}
        self._jobs = jobs
        for sequence, job in jobs.items():
            job.update(sequence, now)
        in_turn = sorted(jobs, key=lambda s: jobs[s].rank)
        decodes, prompts, jumps = set(ready(parts, scheduled)), set(prefilling(parts)), set(jumping(parts))
        can_run = [s for s in in_turn if s in decodes or s in prompts or s in jumps]
        chosen, passed_over = can_run[: self._rows], can_run[self._rows :]
        add_decodes(parts, [s for s in chosen if s in decodes], scheduled, parts.budget.tokens)
        parts.rows.add_jumps([s for s in chosen if s in jumps], scheduled, parts.budget.tokens)
        served = [s for s in chosen if s in prompts]
        if served or parts.waiting:
            parts.plan_prefills(served, scheduled)
        for sequence in scheduled.sequences:
            if sequence in jobs:
                jobs[sequence].last_run = now
        for sequence in passed_over:
            scheduled.paused[sequence] = WaitReason.PEERS


class _Job:
    """The level of a sequence, and its computed tokens there."""

    def __init__(self, sequence: Sequence, now: float) -> None:
        self.level = 0
        self.last_run = self._since = now
        self._begun_at = 0  # computed tokens at `_since`
        while FIRST_QUANTUM_TOKENS << self.level < sequence.num_prompt_tokens:
            self.level += 1

    @property
    def rank(self) -> tuple[int, float]:
        return self.level, self._since

    def update(self, sequence: Sequence, now: float) -> None:
        """Sink at the end of a quantum, or return to the first level after starvation."""
        computed = sequence.num_computed_tokens
        if now - self.last_run >= STARVATION_S:
            self.level, self._begun_at, self._since, self.last_run = 0, computed, now, now
        elif computed - self._begun_at >= FIRST_QUANTUM_TOKENS << self.level:
            self.level, self._begun_at, self._since = self.level + 1, computed, now
