"""The host pool is the second level of the prefix cache: blocks in the host's memory, copied whole from the device's.

A block comes here when it is given up on the device and is worth two copies, and stays after it was copied back, until
its place is needed: giving it up on the device once more is free then.
"""

from collections import Counter, OrderedDict
from sys import maxsize

from backend.paged_kv.block_names import BlockName

UNPLANNED = maxsize  # the step of a copy that no step carries out yet


class HostBlock:
    """A block in host memory. What was copied to it is there for all copies that the same step or a later one makes."""

    __slots__ = ("block", "name", "read", "tenant", "written")

    def __init__(self, name: BlockName, block: int, tenant: str) -> None:
        self.name = name
        self.block = block
        self.tenant = tenant
        self.written = UNPLANNED  # the step that copies to it
        self.read = -1  # the newest step that copies from it


class HostPool:
    """Host blocks by their names, the least recently used given up first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.held: Counter[str] = Counter()  # by tenant
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_name: OrderedDict[BlockName, HostBlock] = OrderedDict()  # the least recently used first

    @property
    def num_used(self) -> int:
        return len(self._by_name)

    def named(self, name: BlockName) -> HostBlock | None:
        """Return the block of that name."""
        return self._by_name.get(name)

    def used(self, host_block: HostBlock) -> None:
        """Note that a block was asked for."""
        self._by_name.move_to_end(host_block.name)

    def store(self, name: BlockName, tenant: str, completed_step: int) -> tuple[HostBlock | None, HostBlock | None]:
        """Return a place for a block of that name, and what was given up for it; None and None where every place is
        in use: a step that is not completed yet may copy to or from the one that would be next.
        """
        given_up = None
        if not self._free:
            given_up = next(iter(self._by_name.values()), None)
            if given_up is None or max(given_up.written, given_up.read) > completed_step:
                return None, None
            self._drop(given_up)
        host_block = self._by_name[name] = HostBlock(name, self._free.pop(), tenant)
        self.held[tenant] += 1
        return host_block, given_up

    def lost(self, step: int) -> None:
        """Forget what this step, and those behind it, were to copy here: they did not take place."""
        for host_block in [one for one in self._by_name.values() if step <= one.written < UNPLANNED]:
            self._drop(host_block)
        for host_block in self._by_name.values():
            if step <= host_block.read < UNPLANNED:
                host_block.read = -1

    def _drop(self, host_block: HostBlock) -> None:
        del self._by_name[host_block.name]
        self._free.append(host_block.block)
        self.held[host_block.tenant] -= 1
        if not self.held[host_block.tenant]:
            del self.held[host_block.tenant]

    def check_integrity(self) -> None:
        used = [host_block.block for host_block in self._by_name.values()]
        assert sorted([*used, *self._free]) == list(range(self.num_blocks)), "host blocks were lost"
        assert self.held == Counter(host_block.tenant for host_block in self._by_name.values()), (
            "a tenant is miscounted"
        )
        assert all(one.name is name for name, one in self._by_name.items()), "a host block has another name"
