"""Decodes that can wait make room for prompts: SLAI, the SLO-aware scheduler of Bari, Hegde and de Veciana (2025).

A decode is critical from its last schedulable time on:

    last schedulable time = end of its last step + time between tokens - offset * mean step

A step takes critical decodes, then running prefills, then waiting prompts, and the remaining room goes to the other
decodes, the most urgent first. With `--order shortest_first` this is the paper's scheduler; any other order keeps its
own promises about admission. The offset is larger where memory is nearly full, so that decodes end sooner. Its values
are from the authors' code, for tokens 0.2 s apart.

Waived: every runnable decode in every step; tokens come as late as their interval allows.
"""

from backend.scheduler.batching import BatchingRule, StepParts
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from labs.batchings.running import add_decodes, jumping, prefilling, ready

DEFAULT_TOKEN_INTERVAL_S = 0.2  # where the class of a sequence promises none
OFFSET_STEPS, FULL_OFFSET_STEPS = 5, 10  # mean steps by which a decode is early; where memory is nearly full
NEARLY_FULL_SHARE_OF_BLOCKS = 0.96  # of the blocks


class SLAI(BatchingRule):
    """Plans critical decodes before prompts, and the others behind them."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._mean, self._num_steps = 0.0, 0  # of all steps, in seconds
        self._last_ends: dict[Sequence, float] = {}  # predicted end of the last step of each decode

    def completed(self, elapsed: float) -> None:
        self._num_steps += 1
        self._mean += (elapsed - self._mean) / self._num_steps

    def plan(self, scheduled: ScheduledStep) -> None:
        parts = self.parts
        begin = scheduled.planned_at + len(parts.in_flight) * self._mean
        critical, others = self._split(ready(parts, scheduled), begin)
        add_decodes(parts, critical, scheduled, parts.budget.tokens)
        parts.rows.add_jumps(jumping(parts), scheduled, parts.budget.tokens)
        prompts = prefilling(parts)
        if prompts or parts.waiting:
            parts.plan_prefills(prompts, scheduled)
        add_decodes(parts, others, scheduled, parts.budget.tokens - scheduled.num_tokens)
        decodes = scheduled.sequences[: scheduled.batch.num_decodes]
        self._last_ends.update(dict.fromkeys(decodes, begin + self._mean))

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        return room

    def _split(self, decodes: list[Sequence], begin: float) -> tuple[list[Sequence], list[Sequence]]:
        """Return critical decodes and other decodes, each most urgent first, for a step that begins at `begin`."""
        used = self.parts.kv_manager.num_held / self.parts.config.num_blocks
        early = (FULL_OFFSET_STEPS if used >= NEARLY_FULL_SHARE_OF_BLOCKS else OFFSET_STEPS) * self._mean
        self._last_ends = {sequence: self._last_ends.get(sequence, begin) for sequence in decodes}
        due = {one: end + _interval(one) - early for one, end in self._last_ends.items()}
        by_due = sorted(decodes, key=due.__getitem__)
        return [one for one in by_due if due[one] <= begin], [one for one in by_due if due[one] > begin]


def _interval(sequence: Sequence) -> float:
    return DEFAULT_TOKEN_INTERVAL_S if sequence.request.token_interval is None else sequence.request.token_interval
