"""Prompts in steps of their own, before all decodes: vLLM's first scheduler (Kwon et al., 2023).

A step computes prompts, packed into a microbatch of at most `max_num_batched_tokens`, or decodes, never both. First
tokens come as early as possible, and all decodes stall meanwhile; chunked prefill beside decodes removes these stalls
(Sarathi-Serve: Agrawal et al., 2024). Use `--prefill-chunk off` for the original.

Waived: every decode in every step, and with it the promised times between tokens.
"""

from backend.scheduler.batching import BatchingRule
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from labs.batchings.running import prefilling


class PrefillFirst(BatchingRule):
    """Plans decodes only in steps without a prefill."""

    def plan(self, scheduled: ScheduledStep) -> None:
        prompts = prefilling(self.parts)
        if prompts or self.parts.waiting:
            self.parts.plan_prefills(prompts, scheduled)
        if not scheduled.sequences:
            self.parts.plan_decodes(scheduled)

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        return room
