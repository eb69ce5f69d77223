"""The host pool is the second level of the prefix cache: blocks in the host's memory, copied whole from the device's.

A block is copied here when it is evicted on the device and is worth two copies. It stays after it was copied back,
until its place is needed, so that its next eviction on the device costs no copy.
"""

from collections import Counter, OrderedDict
from sys import maxsize

from backend.paged_kv.block_names import BlockName

UNPLANNED = maxsize  # the step of a copy that no step carries out yet
STALE_POOL_FILLS = 8  # pool fills after which an unused block is evicted before others, also of tenants that hold more


class HostBlock:
    """A block in host memory; copies of the same step and of later ones can read its content."""

    __slots__ = ("block", "name", "read", "tenant", "used", "written")

    def __init__(self, name: BlockName, block: int, tenant: str, used: int) -> None:
        self.name = name
        self.block = block
        self.tenant = tenant
        self.used = used  # the count of blocks that the pool had taken at the last use
        self.written = UNPLANNED  # the step that copies to it
        self.read = -1  # the newest step that copies from it


class HostPool:
    """Host blocks by their names. The victim is the tenant furthest above its floor, by its least recently used block,
    so that a flood evicts the flooding tenant's own blocks. Stale blocks are evicted before, down to their tenant's
    floor, because a tenant that left would otherwise keep its share for ever.

    Storing a block and looking one up are O(1), except when a tenant's last block is dropped: then tenants are searched
    by the count of their blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.held: Counter[str] = Counter()  # by tenant
        self._stored = 0  # blocks taken so far
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_name: OrderedDict[BlockName, HostBlock] = OrderedDict()  # the least recently used first
        self._by_tenant: dict[str, OrderedDict[BlockName, HostBlock]] = {}  # the same of each tenant
        self._floors: dict[str, int] = {}
        self._by_excess: dict[int, dict[str, None]] = {}  # tenants by the count of their blocks beyond their floors
        self._most = 0  # the largest excess of a tenant

    @property
    def num_used(self) -> int:
        return len(self._by_name)

    def named(self, name: BlockName) -> HostBlock | None:
        return self._by_name.get(name)

    def limit(self, tenant: str, floor: int) -> None:
        """Never evict the tenant's last `floor` blocks for others. All floors together fit the pool."""
        self._leave_excess(tenant)
        self._floors.pop(tenant, None)
        if floor:
            self._floors[tenant] = floor
        self._join_excess(tenant)

    def used(self, host_block: HostBlock) -> None:
        """Record a use of a block."""
        host_block.used = self._stored
        self._by_name.move_to_end(host_block.name)
        self._by_tenant[host_block.tenant].move_to_end(host_block.name)

    def store(self, name: BlockName, tenant: str, completed_step: int) -> tuple[HostBlock | None, HostBlock | None]:
        """Return a place for a block of that name, and the block evicted for it; None and None if every place is in
        use, because a step that is not completed may copy to or from the next victim.
        """
        given_up = None
        if not self._free:
            given_up = self._next_to_go(tenant)
            if given_up is None or max(given_up.written, given_up.read) > completed_step:
                return None, None
            self._drop(given_up)
        self._stored += 1
        host_block = self._by_name[name] = HostBlock(name, self._free.pop(), tenant, self._stored)
        self._by_tenant.setdefault(tenant, OrderedDict())[name] = host_block
        self._change(tenant, 1)
        return host_block, given_up

    def undo_from(self, step: int) -> None:
        """Forget the copies of this step, and of later ones, to the host: they did not take place."""
        for host_block in [one for one in self._by_name.values() if step <= one.written < UNPLANNED]:
            self._drop(host_block)
        for host_block in self._by_name.values():
            if step <= host_block.read < UNPLANNED:
                host_block.read = -1

    def _next_to_go(self, tenant: str) -> HostBlock | None:
        """Return the victim for a block of the tenant; None: there is none."""
        oldest = next(iter(self._by_name.values()), None)
        if oldest is None:
            return None
        is_stale = self._stored - oldest.used > STALE_POOL_FILLS * self.num_blocks
        if is_stale and (oldest.tenant == tenant or self._excess(oldest.tenant) > 0):
            return oldest
        largest = tenant if self._excess(tenant) >= self._most else next(iter(self._by_excess[self._most]))
        return next(iter(self._by_tenant[largest].values()))

    def _drop(self, host_block: HostBlock) -> None:
        name, tenant = host_block.name, host_block.tenant
        del self._by_name[name]
        own = self._by_tenant[tenant]
        del own[name]
        if not own:
            del self._by_tenant[tenant]
        self._free.append(host_block.block)
        self._change(tenant, -1)

    def _change(self, tenant: str, blocks: int) -> None:
        """Count blocks that a tenant has gained or lost, one at a time."""
        self._leave_excess(tenant)
        self.held[tenant] += blocks
        if not self.held[tenant]:
            del self.held[tenant]
        self._join_excess(tenant)

    def _excess(self, tenant: str) -> int:
        return self.held[tenant] - self._floors.get(tenant, 0)

    def _leave_excess(self, tenant: str) -> None:
        excess = self._excess(tenant)
        if tenant in self.held:
            del self._by_excess[excess][tenant]
            if not self._by_excess[excess]:
                del self._by_excess[excess]

    def _join_excess(self, tenant: str) -> None:
        if tenant in self.held:
            excess = self._excess(tenant)
            self._by_excess.setdefault(excess, {})[tenant] = None
            self._most = max(self._most, excess)
        if self._most not in self._by_excess:  # mostly it is one less now
            self._most -= 1
            if self._most not in self._by_excess:
                self._most = max(self._by_excess, default=0)

    def check_integrity(self) -> None:
        used = [host_block.block for host_block in self._by_name.values()]
        assert sorted([*used, *self._free]) == list(range(self.num_blocks)), "host blocks were lost"
        assert self.held == Counter(host_block.tenant for host_block in self._by_name.values()), (
            "a tenant is miscounted"
        )
        assert all(one.name is name for name, one in self._by_name.items()), "a host block has another name"
        for tenant in self._by_tenant.keys() | self.held.keys():
            own = [one for one in self._by_name.values() if one.tenant == tenant]
            assert own == list(self._by_tenant[tenant].values()), "a tenant's host blocks are out of order"
            assert tenant in self._by_excess[self._excess(tenant)], "a tenant has another excess than is known"
        assert sum(map(len, self._by_excess.values())) == len(self.held), "a tenant that has nothing is looked for"
        assert self._most == max(self._by_excess, default=0), "no tenant has the largest excess"
