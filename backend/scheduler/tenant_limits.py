"""A tenant's limits on tokens and KV memory hold back its own sequences, never another tenant's."""

from operator import attrgetter

from backend.config import EngineConfig
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

YOUNGEST = attrgetter("request.priority_class", "arrival", "id")
"""Sort key of victims within a tenant: the largest is preempted first."""


class TenantLimits:
    """A tenant runs only sequences whose joint peak its allowance of blocks can hold.

    If free blocks alone decided, all of a tenant's sequences could stop half-way, each short of memory that only
    another could free.
    """

    def __init__(self, config: EngineConfig, kv_manager: KVManager, hooks: SchedulerHooks) -> None:
        self._blocks_for = config.kv_blocks
        self._kv_manager = kv_manager
        self._hooks = hooks

    def allows(self, sequence: Sequence, hit: PrefixHit, scheduled: ScheduledStep) -> bool:
        """Return True if the tenant's allowance covers the blocks that the waiting sequence starts with, and the peak
        of all its running sequences with this one. Blocks already charged to the tenant count once.
        """
        tenant, allowances = sequence.tenant, self._kv_manager.allowances
        own = [s for s in self._kv_manager.running_of(tenant) if sequence.is_spare or not s.is_spare]
        if any(s in scheduled.paused for s in own):
            return False
        blocks = self._kv_manager.blocks
        adapter = blocks.adapters.num_unpaid(sequence)
        if not blocks.permits(tenant, blocks.blocks_to_start(sequence) - hit.num_paid + adapter, hit):
            return False
        shared = hit.num_paid - hit.num_pinned  # with running sequences: idle pinned blocks give way
        return allowances.permits_in_all(tenant, self._peak([*own, sequence]) - shared)

    def demand(self, tenant: str) -> int:
        """Return the blocks that the tenant would hold without a limit: the largest of its holdings, its denied
        request, and the peak of its running sequences with its idle pinned blocks.
        """
        allowances, pinned = self._kv_manager.allowances, self._kv_manager.blocks.pinned_prefixes.idle_of(tenant)
        own = self._kv_manager.running_of(tenant)
        return max(allowances.held[tenant], allowances.requested.get(tenant, 0), self._peak(own) + pinned if own else 0)

    def _peak(self, own: list[Sequence]) -> int:
        """Return the peak blocks of one tenant's sequences and their adapters, at least the blocks for the oldest to
        run to its end.
        """
        oldest = min(own, key=YOUNGEST)
        adapters = {adapter for s in own if (adapter := s.request.adapter) is not None}
        longest = self._blocks_for(oldest.request.most_tokens - 1, oldest.request.model)
        peak = max(self._hooks.peak(own) if len(own) > 1 else 0, longest)
        return peak + sum([adapter.num_blocks for adapter in adapters])
