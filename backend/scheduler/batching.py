"""A batching rule decides when waiting sequences join a step, and which running sequences have rows in it."""

from collections import deque
from collections.abc import Callable, Sized
from dataclasses import dataclass

from backend.config import Batching, EngineConfig
from backend.scheduler.batch import Counters
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.lost_steps import TokenBudget
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from backend.scheduler.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class StepParts:
    """The scheduler's parts that a rule plans a step with.

    `plan_decodes` adds a row for every decode and returns the prefilling sequences; `plan_prefills` spends the rest of
    the step on these, and on waiting sequences, which it admits.
    """

    config: EngineConfig
    kv_manager: KVManager
    waiting: Sized
    in_flight: deque[ScheduledStep]
    rows: StepRows
    budget: TokenBudget
    counters: Counters
    plan_decodes: Callable[[ScheduledStep], list[Sequence]]
    plan_prefills: Callable[[list[Sequence], ScheduledStep], None]


class BatchingRule:
    """Continuous batching (Orca: Yu et al., 2022): every sequence that fits joins any step, and every decode is in
    every step.

    Other rules derive from it and name the part that they waive. Rules are pure: their clock is `planned_at`.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.wakes_at: float | None = None  # when the next plan may differ without an event

    def arrived(self, sequence: Sequence) -> None:
        """A sequence has joined the queue for the first time."""

    def left(self, sequence: Sequence) -> None:
        """A sequence has left the queue: it was admitted, or is about to finish."""

    def completed(self, elapsed: float) -> None:
        """A step has completed in `elapsed` seconds."""

    def plan(self, scheduled: ScheduledStep) -> None:
        """Plan all rows of a step: decodes before prefills, because each costs one token of the budget, and leaving one
        out would delay a token for its client; a prefill goes on in the next step.
        """
        prefilling = self.parts.plan_decodes(scheduled)
        if prefilling or self.parts.waiting:
            self.parts.plan_prefills(prefilling, scheduled)

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        """Return the tokens for prompts out of `room`, the rest of the step's budget; None: as many as the promised
        times between tokens allow.
        """
        return None

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        """Return why this rule keeps the head of the queue out of the step, regardless of room; None: it may join."""
        return None


RULES: dict[Batching, type[BatchingRule]] = {Batching.CONTINUOUS: BatchingRule}
"""The rules that can be chosen; other packages add theirs (`backend.extensions`)."""
