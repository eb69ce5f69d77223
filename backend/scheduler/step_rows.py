"""The rows of a step beside its decodes: blocks for their tokens, and tokens that need no sampling."""

from backend.scheduler.drafting import Drafting
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.preemption import Preemption
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence, SequenceStatus

_RUNNING = SequenceStatus.RUNNING  # see `kv_manager`: looking it up takes time


class StepRows:
    """Adds rows to a step that is planned."""

    def __init__(self, kv_manager: KVManager, preemption: Preemption, drafting: Drafting | None) -> None:
        self._drafting = drafting
        self._blocks = kv_manager.blocks
        self._preemption = preemption

    def grow(self, sequence: Sequence, length: int, scheduled: ScheduledStep) -> bool:
        """Allocate blocks for `length` more tokens, preempting others if need be; False when there are none yet."""
        tables, held = self._blocks, len(sequence.block_table.blocks)
        needed = tables.blocks_to_grow(sequence, length)
        if not needed:
            return True
        if not tables.permits(sequence.tenant, needed):
            self._preemption.take_back(sequence)
            scheduled.paused[sequence] = WaitReason.ALLOWANCE
            return False
        kept = self._preemption.num_kept_from(sequence)
        blocks = self._allocate(sequence, needed, kept)
        if blocks is None:
            self._preemption.preempt_for_running(sequence, needed + kept, scheduled.batch.step)
            blocks = self._allocate(sequence, needed, kept)
        if blocks is None:
            return False
        scheduled.batch.new_blocks.append((sequence.slot, held, blocks))
        return True

    def _allocate(self, sequence: Sequence, needed: int, kept: int) -> list[int] | None:
        """Allocate blocks; None if there are too few, or fewer than `kept` would stay free."""
        if kept and needed + kept > self._blocks.num_available:
            return None
        return self._blocks.allocate(sequence, needed)

    def add_jumps(self, jumping: list[Sequence], scheduled: ScheduledStep, most: int) -> None:
        """Add rows for tokens that grammars force, or behind which others are drafted: decodes in fewer steps, which
        wait for no prefill.

        The step has at most `most` tokens: each sequence can have one at least, as decodes can.
        """
        left = most - len(scheduled.sequences)
        for behind, sequence in enumerate(jumping, 1 - len(jumping)):
            length = min(sequence.num_uncomputed_tokens, left + behind)
            if length > 0 and sequence.status is _RUNNING and self.grow(sequence, length, scheduled):
                self.add_prefill(sequence, length, scheduled)
                left -= length
                sequence.jumps = sequence.num_computed_tokens < sequence.num_admitted_tokens
                if self._drafting is not None and sequence.request.grammar is None and not sequence.jumps:
                    self._blocks.name_known(sequence)
                    scheduled.add_draft(sequence, draft := self._drafting.draft(sequence, left + behind))
                    left -= len(draft)

    def add_prefill(self, sequence: Sequence, length: int, scheduled: ScheduledStep) -> None:
        """Add a row of `length` tokens, for which there are blocks."""
        start = sequence.num_computed_tokens
        scheduled.add_prefill(sequence, length)
        self._blocks.publish(sequence, start, scheduled.batch.step)
