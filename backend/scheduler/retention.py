"""Retention says what keeping the blocks of a sequence that has ended is worth, until its next turn comes."""

from enum import StrEnum
from typing import Protocol

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import IdleChain


class Keep(StrEnum):
    """What becomes of the blocks of a sequence that has ended."""

    WHILE_WORTH = "while_worth"  # until their memory is needed, and those of least worth go first
    WHILE_RECENT = "while_recent"  # until their memory is needed, and the least recently used go first
    HELD = "held"  # those that a client expects to come back for are not for newcomers to take
    DROPPED = "dropped"  # nothing is kept


class Retention(Protocol):
    """The cache tells this what was left and what came back, and asks it what idle chains are worth."""

    keep: Keep

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Note that a sequence has ended whose last full block is `last`, and leaves this chain; say of what kind it
        is.
        """
        ...

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        """Note that somebody came whose prompt has these blocks. Returns the chain of the turn before it."""
        ...

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        """Return how much computing a second of keeping a block saves, where the chain has been idle for `age`
        seconds.
        """
        ...

    def probability(self, chain: IdleChain, age: float) -> float | None:
        """Return how probable it is that the chain comes back; None where nothing was learned of it."""
        ...


class KeepRecent:
    """Nothing is learned: the least recently used goes first."""

    keep = Keep.WHILE_RECENT

    def left(self, chain: IdleChain, last: BlockName) -> None:
        pass

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        return None

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        return -age

    def probability(self, chain: IdleChain, age: float) -> float | None:
        return None
