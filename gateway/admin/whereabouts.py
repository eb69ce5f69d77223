"""Where a live request is, and what keeps it there."""

from asyncio import get_running_loop
from collections.abc import Iterable
from enum import StrEnum

from admission.explain import BEHIND, PAUSED, REASONS
from backend.scheduler import Scheduler
from backend.sequence import Sequence, Status
from gateway.telemetry.story import Story

SLOW = 0.5  # seconds without progress of a write, from which on its client is said to be slow
_WAITS = frozenset({Status.WAITING, Status.PREEMPTED})


class State(StrEnum):
    READING = "reading"
    RESERVING = "reserving"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    ENDING = "ending"


def state_of(story: Story) -> State:
    """Of several sequences, that which is furthest."""
    if story.body_read is None:
        return State.READING
    if story.settling is not None:
        return State.ENDING
    if not story.trails:
        return State.RESERVING
    states = {_state(trail.sequence) for trail in story.trails}
    return next(state for state in (State.DECODING, State.PREFILL, State.WAITING, State.ENDING) if state in states)


def is_waiting(sequence: Sequence) -> bool:
    """For the engine: it holds no memory, or has to give it up."""
    return sequence.status in _WAITS


def _state(sequence: Sequence) -> State:
    match sequence.status:
        case Status.WAITING | Status.PREEMPTED:
            return State.WAITING
        case Status.RUNNING:
            return State.DECODING if sequence.output else State.PREFILL
        case Status.FINISHED:
            return State.ENDING


class Reasons:
    """Reads off a scheduler, as of now, why sequences wait or stand still. Changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def of(self, story: Story) -> str | None:
        """None: nothing keeps it."""
        kept = self._first(trail.sequence for trail in story.trails)
        since = story.scope.writing_since if story.scope is not None else None
        if since is not None and (stuck := get_running_loop().time() - since) > SLOW:
            return f"its client reads slowly: a write has waited {stuck:.1f} s"
        return kept

    def _first(self, sequences: Iterable[Sequence]) -> str | None:
        return next((reason for s in sequences if (reason := self.of_sequence(s)) is not None), None)

    def of_sequence(self, sequence: Sequence) -> str | None:
        match sequence.status:
            case Status.WAITING | Status.PREEMPTED:
                return self._of_waiting(sequence)
            case Status.RUNNING:
                return self._of_running(sequence)
        return None

    def _of_waiting(self, sequence: Sequence) -> str:
        scheduler = self._scheduler
        limit = scheduler.held.get(sequence.tenant)
        if limit is not None:
            return REASONS[limit]
        if scheduler.blocked is None:
            return "until the next step is planned"
        reason = REASONS[scheduler.blocked]
        return reason if scheduler.blocked_head is sequence else BEHIND + reason

    def _of_running(self, sequence: Sequence) -> str | None:
        """It may stand still at a limit of its tenant."""
        if sequence.num_tokens == sequence.token_limit < sequence.most_tokens:
            return PAUSED + REASONS["tokens"]
        room = len(sequence.block_table) * self._scheduler.config.block_size
        if sequence.num_computed_tokens >= room and sequence.tenant in self._scheduler.holdings.allowances.wanted:
            return PAUSED + REASONS["allowance"]
        return None
