"""Decodes that can wait make room for prompts: SLAI, the SLO-aware scheduler of Bari, Hegde and de Veciana (2025).

A decode is critical from the last moment on at which it can be scheduled and be in time,

    last schedulable time = end of its last step + time between tokens - offset * mean step

A step takes critical decodes, then prompts that are being computed, then those that wait, and what room is left goes to
the other decodes, the most urgent first. With prompts in the order of their lengths (`--order shortest_first`) this is
the paper's; any other order keeps its promises about who is admitted. The offset is larger where memory is nearly full:
decodes end sooner then. Its values are those of the authors' code, for tokens 0.2 s apart.

Waived is that every decode that can run is in every step: tokens come as late as they may.
"""

from collections import deque
from collections.abc import Callable, Sized

from backend.scheduler.kv_manager import KVManager
from backend.scheduler.lost_steps import TokenBudget
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from backend.scheduler.step_rows import StepRows

TIME_BETWEEN_TOKENS = 0.2  # seconds, where the class of a sequence promises none
OFFSET, OFFSET_FULL = 5, 10  # mean steps by which a decode is early; where memory is nearly full
NEARLY_FULL = 0.96  # of the blocks


class SLAI:
    """Plans critical decodes before prompts, and the others behind them."""

    def __init__(
        self, kv_manager: KVManager, rows: StepRows, budget: TokenBudget, in_flight: deque[ScheduledStep]
    ) -> None:
        self._kv_manager, self._rows, self._budget, self._in_flight = kv_manager, rows, budget, in_flight
        self._mean, self._num_steps = 0.0, 0  # of all steps, in seconds
        self._last_ends: dict[Sequence, float] = {}  # of the last step of each that decodes, as expected

    def completed(self, elapsed: float) -> None:
        """A step took so many seconds."""
        self._num_steps += 1
        self._mean += (elapsed - self._mean) / self._num_steps

    def plan(
        self, scheduled: ScheduledStep, waiting: Sized, plan_prefills: Callable[[list[Sequence], ScheduledStep], None]
    ) -> None:
        """Plan all rows of a step."""
        begin = scheduled.planned_at + len(self._in_flight) * self._mean
        ready, prefilling, jumping = self._running(scheduled)
        critical, others = self._split(ready, begin)
        self._rows.add_decodes(critical, scheduled, self._budget.tokens)
        self._rows.add_jumps(jumping, scheduled, self._budget.tokens)
        if prefilling or waiting:
            plan_prefills(prefilling, scheduled)
        self._rows.add_decodes(others, scheduled, self._budget.tokens - scheduled.num_tokens)
        decodes = scheduled.sequences[: scheduled.batch.num_decodes]
        self._last_ends.update(dict.fromkeys(decodes, begin + self._mean))

    def _running(self, scheduled: ScheduledStep) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Return the decodes that can run, the prompts that are being computed, and those with forced tokens."""
        ready, prefilling, jumping = list[Sequence](), list[Sequence](), list[Sequence]()
        for sequence in self._kv_manager.running.values():
            if sequence.num_computed_tokens < sequence.num_admitted_tokens:
                (jumping if sequence.jumps else prefilling).append(sequence)
            elif sequence.num_computed_tokens == sequence.num_tokens:
                continue  # nothing to compute until its last token is known
            elif sequence.num_tokens != sequence.token_limit:
                ready.append(sequence)
            elif sequence.num_tokens < sequence.most_tokens:
                scheduled.paused[sequence] = WaitReason.TOKENS
        return ready, prefilling, jumping

    def _split(self, ready: list[Sequence], begin: float) -> tuple[list[Sequence], list[Sequence]]:
        """Return critical decodes and the others, the most urgent first, for a step that begins at a time."""
        used = self._kv_manager.num_held / self._kv_manager.blocks.pool.num_blocks
        early = (OFFSET_FULL if used >= NEARLY_FULL else OFFSET) * self._mean
        self._last_ends = {sequence: self._last_ends.get(sequence, begin) for sequence in ready}
        due = {one: end + _interval(one) - early for one, end in self._last_ends.items()}
        ready = sorted(ready, key=due.__getitem__)
        return [one for one in ready if due[one] <= begin], [one for one in ready if due[one] > begin]


def _interval(sequence: Sequence) -> float:
    return TIME_BETWEEN_TOKENS if sequence.token_interval is None else sequence.token_interval
