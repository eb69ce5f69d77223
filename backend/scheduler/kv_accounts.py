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
        self.cache = kv_manager.cache  # the counts of idle blocks
        self.host = kv_manager.blocks.swapping.host  # the counts of blocks in the host's memory

    @property
    def num_held(self) -> int:
        """Blocks held by sequences."""
        return self._kv.num_held

    @property
    def num_queried_tokens(self) -> int:
        """The prompt tokens looked for in the prefix cache since the start, each once; 0 where there is none."""
        counters = self._kv.counters
        return counters.prompt_tokens + counters.cached_tokens if self._kv.blocks.shares_blocks else 0

    def held(self) -> Counter[str]:
        """Return the blocks that each tenant's sequences hold."""
        return Counter(self._kv.allowances.held) - self.pinned()

    def pinned(self) -> Counter[str]:
        """Return the idle pinned blocks of each tenant: a block pinned by two tenants counts for both."""
        return self._kv.blocks.pinned_prefixes.idle_by_tenant()

    def charged(self) -> Counter[str]:
        """Return the blocks charged to each tenant: held by its sequences, kept by its floor, or pinned by it."""
        return self.held() + self.cache.kept_by_tenant() + self.pinned()

    def unused_slots(self) -> Counter[str]:
        """Return the token slots that are allocated to each tenant's running sequences and hold no token yet."""
        unused, blocks = Counter[str](), self._kv.blocks
        for sequence in self._kv.running.values():
            slots = len(sequence.block_table.blocks) * blocks.block_size
            unused[sequence.tenant] += (slots - sequence.num_computed_tokens) * blocks.one_place_each([sequence])
        return unused
