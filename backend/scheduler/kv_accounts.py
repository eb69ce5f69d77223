"""Accounts of KV memory: the present use of blocks, in total and by tenant."""

from collections import Counter

from backend.scheduler.kv_manager import KVManager


class KVAccounts:
    """Reads the scheduler's own counts: each figure costs O(1), each figure by tenant O(tenants) or O(running).

    Totals count physical blocks: a shared block is one block, held and not idle. Figures by tenant count charged
    blocks: a shared block counts once for each tenant that holds it, so that their sum may exceed the total. An idle
    block is charged only to a tenant whose floor keeps it, or to each tenant that pins it. Host blocks are apart from
    both.
    """

    def __init__(self, kv_manager: KVManager) -> None:
        self._kv = kv_manager
        self._blocks, self._cache = kv_manager.blocks, kv_manager.cache
        self._prefixes = kv_manager.blocks.pinned_prefixes
        self._swapping = kv_manager.blocks.swapping

    @property
    def num_held(self) -> int:
        """Blocks held by sequences."""
        return self._kv.num_held

    @property
    def num_shared(self) -> int:
        """The held blocks with more than one holder."""
        return self._blocks.holdings.num_shared

    @property
    def num_idle(self) -> int:
        """Cached blocks without holders."""
        return self._cache.num_idle

    @property
    def num_floored(self) -> int:
        """The idle blocks kept by tenants' floors."""
        return self._cache.num_kept - self._cache.num_pinned

    @property
    def num_pinned(self) -> int:
        """The idle blocks pinned by a policy."""
        return self._cache.num_pinned

    @property
    def num_swapped(self) -> int:
        """The blocks in the host's memory."""
        return self._swapping.host.num_used

    @property
    def num_host_blocks(self) -> int:
        """The blocks that fit the host's memory."""
        return self._swapping.host.num_blocks

    @property
    def num_queried_tokens(self) -> int:
        """The prompt tokens looked for in the prefix cache since the start, each once; 0 where there is none."""
        counters = self._kv.counters
        return counters.prompt_tokens + counters.cached_tokens if self._blocks.shares_blocks else 0

    @property
    def evictions(self) -> int:
        """Idle blocks evicted since the start."""
        return self._cache.evictions

    @property
    def swaps_declined(self) -> int:
        """The evicted blocks that were not copied to the host: not worth two copies, or every place was in use."""
        return self._swapping.declined

    def held(self) -> Counter[str]:
        """Return the blocks that each tenant's sequences hold."""
        return Counter(self._kv.allowances.held) - self.pinned()

    def pinned(self) -> Counter[str]:
        """Return the idle pinned blocks of each tenant: a block pinned by two tenants counts for both."""
        return self._prefixes.idle_by_tenant()

    def idle(self) -> Counter[str]:
        """Return the unpinned idle blocks by the tenant that used each last."""
        return self._cache.idle_by_tenant()

    def kept(self) -> Counter[str]:
        """Return by tenant the idle blocks kept by its floor."""
        return self._cache.kept_by_tenant()

    def charged(self) -> Counter[str]:
        """Return the blocks charged to each tenant: held by its sequences, kept by its floor, or pinned by it."""
        return self.held() + self.kept() + self.pinned()

    def kept_block_seconds(self, now: float) -> dict[str, float]:
        """Return the block-seconds of each tenant's floor and pins until `now`.

        With the block-seconds of its sequences they add up to the tenant's charge for memory.
        """
        return self._cache.kept.all_block_seconds(now)

    def swapped(self) -> Counter[str]:
        """Return the host blocks of each tenant."""
        return Counter(self._swapping.host.held)

    def unused_slots(self) -> Counter[str]:
        """Return the token slots that are allocated to each tenant's running sequences and hold no token yet."""
        unused: Counter[str] = Counter()
        for sequence in self._kv.running.values():
            slots = len(sequence.block_table.blocks) * self._blocks.block_size
            unused[sequence.tenant] += slots - sequence.num_computed_tokens
        return unused
