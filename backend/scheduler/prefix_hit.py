"""The prefix hit of a sequence: tokens cached, or being computed for another sequence."""

from dataclasses import dataclass, field

from backend.paged_kv.host_pool import HostBlock
from backend.paged_kv.prefix_cache import CachedBlock


@dataclass(slots=True)
class PrefixHit:
    """The cached blocks of a sequence's tokens, from the end of its block table on."""

    blocks: list[CachedBlock] = field(default_factory=list)
    swapped: list[HostBlock] = field(default_factory=list)  # host blocks that follow on `blocks`
    is_cut: bool = False  # the host has more blocks than one step may copy
    num_held: int = 0  # of `blocks`, held or pinned ones: sharing them takes no memory
    num_paid: int = 0  # of `blocks`, already charged to its tenant
    num_pinned: int = 0  # of the paid ones, idle blocks pinned by its tenant
    is_being_computed: bool = False  # the step being planned computes the next block
    follows_leader: bool = False  # another answer to the prompt computes the rest of it, in that step or a later one
    windows: list[CachedBlock | HostBlock] = field(default_factory=list)  # of layers with a window, before its end
    first_seen: int = 0  # the first place of `windows`
    fork_row: int | None = None  # row of that step that completes the prompt: the sequence can be forked from it

    @property
    def cached(self) -> list[CachedBlock]:
        """Its blocks on the device."""
        if not self.windows:
            return self.blocks
        return [*self.blocks, *[one for one in self.windows if isinstance(one, CachedBlock)]]

    @property
    def num_blocks(self) -> int:
        """The blocks of its tokens, those of windows left out."""
        return len(self.blocks) + len(self.swapped)

    @property
    def num_held_blocks(self) -> int:
        """All blocks that its sequence comes to hold."""
        return len(self.blocks) + len(self.swapped) + len(self.windows)

    @property
    def num_copied(self) -> int:
        """The blocks that are copied back from the host."""
        copied = len(self.swapped)
        return copied + sum([isinstance(one, HostBlock) for one in self.windows]) if self.windows else copied

    def count(self, cached: CachedBlock, tenant: str) -> None:
        """Count one of its blocks, where a sequence holds it or it is pinned, and where the tenant pays for it."""
        if cached.holders:
            self.num_held += 1
            self.num_paid += cached.payer(tenant) is not None
        elif cached.pinned_for:
            self.num_held += 1
            self.num_pinned += tenant in cached.pinned_for

    def cut(self, swapped: int) -> None:
        """Leave all but `swapped` blocks on the host for another step."""
        if swapped < len(self.swapped):
            del self.swapped[swapped:]
            self.is_cut = True


NO_HIT = PrefixHit()
