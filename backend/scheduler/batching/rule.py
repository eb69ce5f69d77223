"""A batching rule decides when those that wait may join a step, and which rows of those running the step computes."""

from collections import deque
from collections.abc import Callable, Sized

from backend.config import EngineConfig
from backend.scheduler.batch import Counters
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.lost_steps import TokenBudget
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from backend.scheduler.step_rows import StepRows


class StepParts:
    """What a step is planned of: the scheduler's own parts, and its ways of filling a step."""

    def __init__(
        self,
        config: EngineConfig,
        kv_manager: KVManager,
        waiting: Sized,
        in_flight: deque[ScheduledStep],
        rows: StepRows,
        budget: TokenBudget,
        counters: Counters,
        plan_decodes: Callable[[ScheduledStep], list[Sequence]],
        plan_prefills: Callable[[list[Sequence], ScheduledStep], None],
    ) -> None:
        """`plan_decodes` gives every decode its row and returns those that prefill; `plan_prefills` gives these what is
        left of the step, and admits who waits.
        """
        self.config, self.kv_manager, self.running = config, kv_manager, kv_manager.running
        self.waiting, self.in_flight, self.rows = waiting, in_flight, rows
        self.budget, self.counters = budget, counters
        self.plan_decodes, self.plan_prefills = plan_decodes, plan_prefills

    def prefilling(self) -> list[Sequence]:
        """Return those running whose prompts are being computed."""
        return [s for s in self.running.values() if s.num_computed_tokens < s.num_admitted_tokens and not s.jumps]

    def jumping(self) -> list[Sequence]:
        """Return those running with tokens that are forced."""
        return [s for s in self.running.values() if s.num_computed_tokens < s.num_admitted_tokens and s.jumps]

    def ready(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Return the decodes that may run, and note those that pause at a limit of their tenants."""
        ready = list[Sequence]()
        for sequence in self.running.values():
            is_decode = sequence.num_admitted_tokens <= sequence.num_computed_tokens < sequence.num_tokens
            if is_decode and sequence.num_tokens != sequence.token_limit:
                ready.append(sequence)
            elif is_decode and sequence.num_tokens < sequence.most_tokens:
                scheduled.paused[sequence] = WaitReason.TOKENS
        return ready


class BatchingRule:
    """Continuous batching (Orca: Yu et al., 2022): every sequence that fits joins any step, and every decode is in
    every step.

    Other rules derive from it and name the part of it that they waive. They are pure: the time is that of the plan.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.wakes_at: float | None = None  # when the next plan may differ from the last though nothing has happened

    def arrived(self, sequence: Sequence) -> None:
        """A sequence waits that has never run."""

    def left(self, sequence: Sequence) -> None:
        """A sequence waits no longer: it runs, or is about to end."""

    def completed(self, elapsed: float) -> None:
        """A step took `elapsed` seconds."""

    def plan(self, scheduled: ScheduledStep) -> None:
        """Plan all rows of a step: decodes before prefills, as each costs one token and makes the whole step worth its
        reading of the weights.

        A decode that is left out delays a token that a client waits for; a prefill goes on in the next step.
        """
        prefilling = self.parts.plan_decodes(scheduled)
        if prefilling or self.parts.waiting:
            self.parts.plan_prefills(prefilling, scheduled)

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        """Return how many of the `room` tokens that decodes leave of a step prompts may take; None: as many as the
        promised times between tokens allow.
        """
        return None

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        """Return why the head of the queue may not join this step though there may be room; None: it may."""
        return None
