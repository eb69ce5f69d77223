"""The prefix hit of a sequence: tokens cached, or being computed for another sequence."""

from dataclasses import dataclass, field

from backend.paged_kv.host_pool import HostBlock
from backend.scheduler.holdings import Cached


@dataclass(slots=True)
class PrefixHit:
    """The cached blocks with which a sequence's tokens begin, from where its block table ends."""

    blocks: list[Cached] = field(default_factory=list)
    swapped: list[HostBlock] = field(default_factory=list)  # those behind them that the host has
    is_cut: bool = False  # the host has more than one step may copy
    num_held: int = 0  # those that somebody holds, or that are pinned: sharing them takes no memory
    num_paid: int = 0  # those that its tenant is charged for already
    num_pinned: int = 0  # those of them that only a pin of its tenant keeps
    is_being_computed: bool = False  # what follows on them is, by the step that is being planned
    fork_row: int | None = None  # of that step, which completes the prompt: the sequence can sample from it as well

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) + len(self.swapped)

    def cut(self, swapped: int) -> None:
        """Leave all but `swapped` blocks on the host for another step."""
        if swapped < len(self.swapped):
            del self.swapped[swapped:]
            self.is_cut = True


NO_HIT = PrefixHit()
