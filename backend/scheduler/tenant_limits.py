"""A tenant's own limits, on tokens and on KV memory, may hold its sequences back and never those of another tenant."""

from operator import attrgetter

from backend.config import EngineConfig
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

YOUNGEST = attrgetter("priority_class", "arrival", "id")
"""The one of a tenant's sequences with the largest key is preempted first for the others, the smallest last."""


class TenantLimits:
    """A tenant runs no more than its allowance of blocks lets come to its end, the oldest sequence first.

    Were sequences admitted as long as blocks are left, all of a tenant's could stop half-way, each short of memory that
    only another could free.
    """

    def __init__(self, config: EngineConfig, kv_manager: KVManager, hooks: SchedulerHooks) -> None:
        self._blocks_for = config.blocks_for
        self._kv_manager = kv_manager
        self._hooks = hooks

    def allows(self, sequence: Sequence, hit: PrefixHit, scheduled: ScheduledStep) -> bool:
        """Return True if a waiting sequence may join a step: its tenant, who has an allowance, may hold the blocks to
        start with, of which it is charged for some already, and those that all it runs may still need.
        """
        tenant, allowances = sequence.tenant, self._kv_manager.allowances
        own = self._kv_manager.running_of(tenant)
        if any(s in scheduled.paused for s in own):
            return False
        blocks = self._kv_manager.blocks
        if not blocks.permits(tenant, blocks.blocks_to_start(sequence) - hit.num_paid, hit):
            return False
        shared = hit.num_paid - hit.num_pinned  # with those that run: what else is pinned gives way to them
        return allowances.permits_in_all(tenant, self._peak([*own, sequence]) - shared)

    def demand(self, tenant: str) -> int:
        """Return the blocks that the tenant would hold if it might: those denied, and those its sequences may need
        beside what is pinned.
        """
        allowances, pinned = self._kv_manager.allowances, self._kv_manager.blocks.pinned_prefixes.idle_of(tenant)
        own = self._kv_manager.running_of(tenant)
        return max(allowances.held[tenant], allowances.requested.get(tenant, 0), self._peak(own) + pinned if own else 0)

    def _peak(self, own: list[Sequence]) -> int:
        """Return the blocks that one tenant's sequences may come to need; the oldest must be able to run to its end."""
        oldest = min(own, key=YOUNGEST)
        return max(self._hooks.peak(own) if len(own) > 1 else 0, self._blocks_for(oldest.most_tokens - 1))
