"""What a tenant's own limits, on tokens and on KV memory, let its sequences do."""

from operator import attrgetter

from backend.config import EngineConfig
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.kv_manager import ResidentSet
from backend.scheduler.scheduled_step import Blocked, ScheduledStep
from backend.scheduler.sequence import Sequence

YOUNGEST = attrgetter("priority_class", "arrival", "id")
"""The largest is the first of a tenant's to give way to its others, the smallest the last."""


class TenantLimits:
    """A tenant runs no more than its allowance of blocks lets come to its end, the oldest sequence first."""

    def __init__(self, config: EngineConfig, residents: ResidentSet, policy: SchedulerHooks) -> None:
        self._blocks_for = config.blocks_for
        self._holdings = residents.kv_manager
        self._residents = residents
        self._policy = policy

    def met(self, sequence: Sequence, scheduled: ScheduledStep) -> Blocked | None:
        """Which one keeps a waiting sequence from joining a step."""
        if sequence.num_tokens >= sequence.token_limit:
            return Blocked.TOKENS
        return None if self._is_allowed(sequence, scheduled) else Blocked.ALLOWANCE

    def demand(self, tenant: str) -> int:
        """Blocks that the tenant would hold if it might: those it was denied, and what those it runs may need."""
        allowances = self._holdings.allowances
        own = self._residents.of(tenant)
        return max(allowances.held[tenant], allowances.wanted.get(tenant, 0), self._peak(own) if own else 0)

    def _is_allowed(self, sequence: Sequence, scheduled: ScheduledStep) -> bool:
        """Whether its tenant may hold the blocks it starts with, and those that all it runs may still need."""
        tenant, allowances = sequence.tenant, self._holdings.allowances
        if allowances.allowed(tenant) is None:
            return True
        own = self._residents.of(tenant)
        if any(s in scheduled.paused for s in own):
            return False
        if not allowances.permits(tenant, self._holdings.blocks_to_start(sequence)):
            return False
        return allowances.permits_in_all(tenant, self._peak([*own, sequence]))

    def _peak(self, own: list[Sequence]) -> int:
        """Blocks that these sequences of one tenant may come to need; the oldest must be able to run to its end."""
        oldest = min(own, key=YOUNGEST)
        return max(self._policy.peak(own) if len(own) > 1 else 0, self._blocks_for(oldest.most_tokens - 1))
