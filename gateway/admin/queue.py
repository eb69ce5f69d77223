"""What waits for the engine, and why."""

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any

from backend.scheduler import Scheduler
from backend.sequence import Sequence
from gateway.admin.rows import MAX_ROWS, Row
from gateway.admin.unhurried import unhurried
from gateway.admin.whereabouts import Reasons, is_waiting
from gateway.telemetry.story import Story
from quotas.policy import Policy

Place = tuple[bool, bool, float]


class Queue:
    """Of one engine, as of now. Asking changes nothing: not even whose turn it is."""

    def __init__(self, scheduler: Scheduler, reasons: Reasons) -> None:
        self._scheduler = scheduler
        self._reasons = reasons

    async def listed(self, stories: Iterable[Story], policy: Policy, now: float) -> dict[str, Any]:
        """By place: who was looked at last, then who has aged most, then those of tenants that are passed over. What a
        tenant has used lately matters too, and is not in it.
        """
        waiting = [(trail.sequence, story) for story in stories for trail in story.trails if is_waiting(trail.sequence)]
        shown = nsmallest(MAX_ROWS, waiting, key=lambda entry: self._place(entry[0], policy))
        rows = await unhurried(shown, lambda entry: self._row(*entry, now))
        return {"waiting": rows, "truncated": len(waiting) - len(shown)}

    def _place(self, sequence: Sequence, policy: Policy) -> Place:
        scheduler = self._scheduler
        level = policy.classes[min(sequence.priority_class, len(policy.classes) - 1)]
        aged = sequence.arrival - sequence.head_start + level.aging
        return sequence.tenant in scheduler.held, sequence is not scheduler.blocked_head, aged

    def _row(self, sequence: Sequence, story: Story, now: float) -> Row:
        return {
            "id": story.request_id,
            "response_id": story.response_id,
            "tenant": sequence.tenant,
            "class": story.service_class,
            "waited": now - sequence.arrival,
            "prompt_tokens": len(sequence.prompt),
            "reason": self._reasons.of_sequence(sequence),
        }
