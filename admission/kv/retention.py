"""Chooses which blocks of a conversation stay cached between its turns."""

from bisect import bisect_right
from enum import StrEnum

from admission.kv.return_time import GAP_EDGES_S, ReturnTimes
from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import COMMON, PLAIN, WANTED, IdleChain
from backend.scheduler.retention import Keep, KeepRecent, Retention

MIN_RETURN_S = 1.0  # the least time until a return, for the worth of a block
AWAITED_WORTH = 1e6  # above the worth of every block that may not come back


class Between(StrEnum):
    """The rule by which blocks of a sequence that has ended are kept for its next turn."""

    MEASURED = "measured"  # by the measured return times of the tenant's turns, and its clients' hints
    LRU = "lru"  # least recently used first, without hints
    HOLD = "hold"  # blocks with a follow-up hint are not given to newcomers
    DROP = "drop"  # no block is kept


class MeasuredRetention:
    """Evicts first the blocks least likely to be reused soon, within each tenant."""

    keep = Keep.WHILE_WORTH

    def __init__(self) -> None:
        self._times = ReturnTimes()

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Chains of one kind have hinted return times within a factor of the root of 2."""
        self._times.left(chain, last)
        if chain.expects is not None:
            chain.kind = PLAIN + 1 + bisect_right(GAP_EDGES_S, chain.expects)

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        return self._times.arrived(names, now)

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        """The expected reuse of a block shared by several conversations is as far away as its last use. Among sequences
        that wait for their blocks, the first arrival has the highest worth.
        """
        if kind == COMMON:
            return 1.0 / max(age, MIN_RETURN_S)
        return AWAITED_WORTH + age if kind == WANTED else self._times.worth(chain.tenant, chain.expects, age)

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
