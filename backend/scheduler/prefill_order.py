"""The order of prefills: earliest due first, running or waiting.

First come, first served would make all later requests wait for a prompt of many steps, and equal shares would make
every prompt wait for every other. A prompt's due time is fixed as it begins, so none is passed over for ever.
"""

from backend.config import EngineConfig
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import PrefillBudget
from backend.scheduler.sequence import Sequence


class PrefillOrder:
    """The order in which a step computes prompts, and the size of each chunk."""

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks) -> None:
        self._block_size, self._chunk, self._due = config.block_size, config.prefill_chunk, hooks.due

    def served(self, prefilling: list[Sequence]) -> list[Sequence]:
        """Return prefills in the order in which a step serves them."""
        return sorted(prefilling, key=self._due)

    def goes_before(self, head: Sequence, running: Sequence) -> bool:
        """Return True if a waiting sequence is computed before a running one."""
        return self._due(head) < self._due(running)

    def chunk(self, sequence: Sequence, hit: PrefixHit, budget: PrefillBudget) -> int:
        """Return the number of tokens of a prefill that this step can compute beside the hit; 0 when it does not fit.

        Tokens that another sequence computes in this very step are not computed twice, but found in the next; nor are
        tokens that the host has, beyond a block that keeps the step from having no row.
        """
        if hit.is_being_computed:
            return 0
        found = (len(hit.blocks) + len(hit.swapped)) * self._block_size
        start, uncomputed = sequence.num_computed_tokens + found, sequence.num_uncomputed_tokens - found
        if hit.is_cut:
            return budget.fits(start, self._block_size)
        if self._chunk is None:
            return uncomputed if budget.fits(start, uncomputed) == uncomputed else 0
        return budget.fits(start, min(uncomputed, self._chunk))
