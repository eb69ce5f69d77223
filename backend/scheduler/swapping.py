"""Swapping moves evicted blocks to the host's memory, and back on a prefix hit.

A preempted sequence leaves its blocks in the prefix cache, so that swapping it out is the eviction of idle blocks: a
block leaves the device when its memory is needed, and goes to the host if that is worth two copies.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from backend.adapter import AdapterBlockName
from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockName, WindowName
from backend.paged_kv.host_pool import UNPLANNED, HostBlock, HostPool
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.batch import Batch, Counters
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import PrefillBudget

RETURN_RATE_WEIGHT_PER_BLOCK = 0.02  # of each block in its tenant's rate of return
PRIOR_RETURN_RATE = 0.5  # before any block of a tenant was reused or lost


class Swapping:
    """Keeps the host's level of the prefix cache, and the copies that the next step has to make."""

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks, cache: PrefixCache, counters: Counters) -> None:
        self.host = HostPool(config.num_host_blocks)
        self._num_blocks = config.num_blocks
        self.declined = 0  # evicted blocks not copied to the host, so far
        self._hooks, self._cache, self._counters = hooks, cache, counters
        self._returns: dict[str, float] = {}  # by tenant, the reused share of its idle blocks
        self._declined: OrderedDict[BlockName, str] = OrderedDict()  # declined blocks and their tenants
        self._out: list[tuple[int, HostBlock]] = []  # copies that no step carries out yet
        self._in: list[tuple[HostBlock, int]] = []
        self.out_rate = 1.0  # share of recently evicted blocks copied to the host
        if config.num_host_blocks:
            cache.add_feature(self)

    def named(self, name: BlockName) -> HostBlock | None:
        """Return the host's block of that name."""
        return self.host.named(name)

    @contextmanager
    def keeping(self, host_blocks: Iterable[HostBlock]) -> Iterator[None]:
        """Evict none of these host blocks inside the `with` block."""
        read = [(host_block, host_block.read) for host_block in host_blocks]
        for host_block, _ in read:
            host_block.read = UNPLANNED
        try:
            yield
        finally:
            for host_block, before in read:
                host_block.read = before

    def copy_back(self, host_block: HostBlock, block: int) -> None:
        """Have the next step copy a host block to the device before it computes anything."""
        host_block.read = UNPLANNED
        self.host.used(host_block)
        self._in.append((host_block, block))
        self._learn(host_block.tenant, 1.0)

    @property
    def num_due(self) -> int:
        """The copies that the next step has to make."""
        return len(self._out) + len(self._in)

    def plan(self, batch: Batch) -> None:
        """Have a step make the copies that are due."""
        for _, host_block in self._out:
            host_block.written = batch.step
        for host_block, _ in self._in:
            host_block.read = batch.step
        batch.swap_out = [(block, host_block.block) for block, host_block in self._out]
        batch.swap_in = [(host_block.block, block) for host_block, block in self._in]
        self._counters.swapped_out += len(self._out)
        self._counters.swapped_in += len(self._in)
        self._out, self._in = [], []

    def undo_from(self, step: int) -> None:
        """Undo the copies of this lost step and all later ones, of which any number may have been made. The caller
        takes the blocks copied back from their holders.
        """
        self.host.undo_from(step)
        for host_block, _ in self._in:
            host_block.read = -1
        self._in = []

    def fit(self, hit: PrefixHit, end: int, free: int, budget: PrefillBudget) -> None:
        """Cut the hit, which ends behind `end` tokens, to the host blocks that the step has time to copy back, and tell
        its budget of its copies; `free` blocks can be allocated without eviction. A hit with a window is only marked as
        cut.
        """
        due, rate = self.num_due, self.out_rate
        budget.copies(due, free, rate)
        if back := hit.num_copied:
            fitting = budget.fits_back(end, back)
            if fitting < back and hit.windows:
                hit.is_cut = True
                return
            hit.cut(fitting)
            back = hit.num_copied
            budget.copies(due + back + rate * max(0, back - free), max(0, free - back), rate)

    def limit(self, tenant: str, floor: int) -> None:
        """Keep as large a share of the host's blocks for the tenant as its floor is of the device's."""
        if self.host.num_blocks:
            self.host.limit(tenant, floor * self.host.num_blocks // self._num_blocks)

    def becomes_idle(self, cached: CachedBlock) -> bool:
        return False

    def reused(self, cached: CachedBlock) -> None:
        if not isinstance(cached.name, AdapterBlockName):
            self._learn(cached.tenant, 1.0)

    def evicted(self, cached: CachedBlock) -> None:
        name = cached.name
        if isinstance(name, AdapterBlockName) or (cached.chain is not None and cached.chain.is_behind):
            return  # the host has it, or it serves only a text that ends there
        if name is None or self.host.named(name) is not None:
            self.out_rate -= RETURN_RATE_WEIGHT_PER_BLOCK * self.out_rate
            return
        probability, text = self._probability(cached), name.beside if isinstance(name, WindowName) else name
        host_block = None
        if self._hooks.swaps(probability, 1 + len(text.windows)):
            host_block, given_up = self.host.store(name, cached.tenant, self._cache.completed_step)
            if given_up is not None:
                self._learn(given_up.tenant, 0.0)
        self.out_rate += RETURN_RATE_WEIGHT_PER_BLOCK * ((host_block is not None) - self.out_rate)
        if host_block is None:
            self.declined += 1
            self._remember(name, cached.tenant)
        else:
            self._out.append((cached.block, host_block))

    def _probability(self, cached: CachedBlock) -> float:
        """Return the block's probability of reuse: by retention where it has learned of the chain, else by tenant."""
        if cached.is_wanted:
            return 1.0
        retention, chain = self._hooks.retention, cached.chain
        if retention is not None and chain is not None and not cached.is_common:
            return retention.probability(chain, self._cache.kept.now - chain.left_at)
        return self._returns.get(cached.tenant, PRIOR_RETURN_RATE)

    def _remember(self, name: BlockName, tenant: str) -> None:
        """Watch for a request of a block that the host declined, for as long as the pool would have kept it."""
        self._declined[name] = tenant
        self._declined.move_to_end(name)
        if len(self._declined) > self.host.num_blocks:
            self._learn(self._declined.popitem(last=False)[1], 0.0)

    def computed(self, names: Iterable[BlockName]) -> None:
        """Record computed names: for a declined one, a host copy would have saved the recompute."""
        for name in names if self._declined else ():
            if (tenant := self._declined.pop(name, None)) is not None:
                self._learn(tenant, 1.0)

    def _learn(self, tenant: str, outcome: float) -> None:
        before = self._returns.get(tenant, PRIOR_RETURN_RATE)
        self._returns[tenant] = before + RETURN_RATE_WEIGHT_PER_BLOCK * (outcome - before)
