"""Prompts in steps of their own, before all decodes: vLLM's first scheduler (Kwon et al., 2023).

A step computes prompts, packed into a microbatch of at most `max_num_batched_tokens`, or decodes, never both. First
tokens come as early as they can, and every answer that runs stands still meanwhile: the stalls that chunked prefill
beside decodes does away with (Sarathi-Serve: Agrawal et al., 2024). As it was, with `--prefill-chunk off`.

Waived is that every decode is in every step, and with it the promised times between tokens.
"""

from backend.scheduler.batching.rule import BatchingRule
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence


class PrefillFirst(BatchingRule):
    """Plans decodes where no prompt can be computed."""

    def plan(self, scheduled: ScheduledStep) -> None:
        prefilling = self.parts.prefilling()
        if prefilling or self.parts.waiting:
            self.parts.plan_prefills(prefilling, scheduled)
        if not scheduled.sequences:
            self.parts.plan_decodes(scheduled)

    def prefill_room(self, prefilling: list[Sequence], room: int) -> int | None:
        return room
