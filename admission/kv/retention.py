"""Chooses what is kept of a conversation between its turns."""

from bisect import bisect_right
from enum import StrEnum

from admission.kv.return_time import EDGES, ReturnTimes
from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import COMMON, PLAIN, WANTED, IdleChain
from backend.scheduler.retention import Keep, KeepRecent, Retention

SOON = 1.0  # seconds; nothing is expected back sooner than in about as many
CERTAIN = 1e6  # what is worth more than any that may not come back


class Between(StrEnum):
    """The rule by which blocks of a sequence that has ended are kept for its next turn."""

    MEASURED = "measured"  # by when the tenant's turns came back, and by what its clients say
    LRU = "lru"  # the least recently used go first, whatever anybody says
    HOLD = "hold"  # what a client expects to come back for is not given to newcomers
    DROP = "drop"  # nothing is kept


class MeasuredRetention:
    """Gives up first what is least likely to be back soon, of one tenant's own."""

    keep = Keep.WHILE_WORTH

    def __init__(self) -> None:
        self._times = ReturnTimes()

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Chains of a kind were said to be back after times that differ by a factor of the root of 2 at most."""
        self._times.left(chain, last)
        if chain.expects is not None:
            chain.kind = PLAIN + 1 + bisect_right(EDGES, chain.expects)

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        return self._times.arrived(names, now)

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        """What several conversations share is used again, as far as anybody knows, after as long as it has waited. Of
        those that have come for theirs, who came first has it first.
        """
        if kind == COMMON:
            return 1.0 / max(age, SOON)
        return CERTAIN + age if kind == WANTED else self._times.worth(chain.tenant, chain.expects, age)

    def probability(self, chain: IdleChain, age: float) -> float | None:
        return 1.0 if chain.kind == WANTED else self._times.probability(chain.tenant, chain.expects, age)


class Held(KeepRecent):
    keep = Keep.HELD


class Dropped(KeepRecent):
    keep = Keep.DROPPED


def make_retention(rule: Between) -> Retention:
    if rule is Between.MEASURED:
        return MeasuredRetention()
    return {Between.LRU: KeepRecent, Between.HOLD: Held, Between.DROP: Dropped}[rule]()
