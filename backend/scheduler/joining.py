"""Joining tests whether the head of the queue may join a step: its tenant's limits, the step's room, slots and
memory.
"""

from backend.config import EngineConfig, KVAllocation
from backend.scheduler.batching import BatchingRule
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.preemption import Preemption
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence
from backend.scheduler.tenant_limits import TenantLimits


class Joining:
    """Finds the resource that the next sequence in the queue lacks."""

    def __init__(
        self,
        config: EngineConfig,
        kv_manager: KVManager,
        limits: TenantLimits,
        preemption: Preemption,
        hooks: SchedulerHooks,
    ) -> None:
        self._kv_manager, self._limits = kv_manager, limits
        self._preemption, self._hooks = preemption, hooks
        self._is_static = config.batching.is_static
        self._kept_slots = min(1, config.max_num_seqs - 1)  # from the spare class, so that a newcomer finds one free
        self._is_contiguous = config.kv_allocation is KVAllocation.CONTIGUOUS
        self._lacking: Sequence | None = None  # the sequence that lacked something in this plan
        self._num_available = self._num_running = 0  # blocks and sequences, when it did
        # for sequences of other models than the step's, which come before those that are asked about
        self.num_set_aside = self.blocks_set_aside = 0  # slots, and blocks

    def begin_plan(self) -> None:
        self._lacking = None

    def lacks(self, sequence: Sequence) -> None:
        """Record that the head lacks a resource, even after preemptions for it."""
        self._lacking = sequence
        self._num_available, self._num_running = self._kv_manager.blocks.num_available, len(self._kv_manager.running)

    def still_lacks(self, sequence: Sequence) -> bool:
        """Return True if it has lacked something before in this plan, and nothing has become free since: to find out
        again, for each prompt that it may go before, would take as long as its prompt has blocks.
        """
        if sequence is not self._lacking or len(self._kv_manager.running) < self._num_running:
            return False
        return self._kv_manager.blocks.num_available <= self._num_available

    def why_wait(
        self, sequence: Sequence, hit: PrefixHit, length: int, scheduled: ScheduledStep, rule: BatchingRule
    ) -> WaitReason | None:
        """Return what keeps the sequence, whose first chunk has `length` tokens, from joining this step."""
        if sequence.num_tokens >= sequence.token_limit:
            return WaitReason.TOKENS
        has_allowance = self._kv_manager.allowances.allowed(sequence.tenant) is not None
        if has_allowance and not self._limits.allows(sequence, hit, scheduled):
            return WaitReason.ALLOWANCE
        if sequence.request.model != scheduled.batch.model:
            self.num_set_aside += 1
            self.blocks_set_aside += self._kv_manager.blocks.blocks_to_start(sequence)
            return WaitReason.MODEL
        return rule.why_closed(sequence, scheduled) or self._why_no_room(sequence, hit, length, scheduled)

    def _why_no_room(
        self, sequence: Sequence, hit: PrefixHit, length: int, scheduled: ScheduledStep
    ) -> WaitReason | None:
        """Return the lacking resource. A sequence that waits for its leader's prefill needs no room in the step.

        The memory that preempted sequences are giving back goes to a paused running sequence before a newcomer.
        """
        is_being_freed = bool(self._kv_manager.freeing)
        if is_being_freed and scheduled.paused:
            return WaitReason.RELEASE
        is_full = length == 0 and not hit.is_being_computed
        if is_full and (not self._is_static or not scheduled.sequences):
            return WaitReason.BUDGET
        kept = self.num_set_aside + (self._kept_slots if sequence.is_spare else 0)
        if len(self._kv_manager.free_slots) <= kept:
            return WaitReason.RELEASE if is_being_freed else WaitReason.SLOTS
        if self._kv_manager.blocks.adapters.has_to_wait(sequence):
            return WaitReason.ADAPTER
        if self._fits(sequence, hit):
            return None
        return WaitReason.RELEASE if is_being_freed else WaitReason.MEMORY

    def _fits(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Return True if all its tokens fit now, running sequences can grow, and the hooks expect memory to last."""
        tables, running = self._kv_manager.blocks, self._kv_manager.running
        watermark = tables.watermark_blocks(sequence, running.values()) + self.blocks_set_aside
        if not tables.can_allocate(sequence, hit, watermark):
            return False
        if not running or self._is_contiguous:
            return True
        beside, kept = self._preemption.not_giving_way_to(sequence), tables.cache.num_kept
        if tables.adapters.users or sequence.request.adapter is not None:
            kept += tables.adapters.num_in_use(sequence)
        return self._hooks.admits(sequence, beside, tables.num_available, hit.num_held, kept)
