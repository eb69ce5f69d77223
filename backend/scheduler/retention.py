"""Retention: the worth of keeping the blocks of a finished sequence until the next turn of its conversation."""

from enum import StrEnum
from typing import Protocol

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import IdleChain


class Keep(StrEnum):
    """Eviction policy for the blocks of a finished sequence."""

    WHILE_WORTH = "while_worth"  # evictable, least worth first
    WHILE_RECENT = "while_recent"  # evictable, least recently used first
    HELD = "held"  # not evictable for new conversations while the client announced a next turn
    DROPPED = "dropped"  # freed at once


class Retention(Protocol):
    """Learns from chains left and returning turns, and rates idle chains for the cache."""

    keep: Keep

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Record that a finished sequence leaves this chain, whose last full block is `last`, and set the chain's
        kind.
        """
        ...

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        """Record the arrival of a prompt with these blocks. Return the chain of the preceding turn."""
        ...

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        """Return the computing saved by keeping a block for a second, for a chain idle for `age` seconds."""
        ...

    def probability(self, chain: IdleChain, age: float) -> float | None:
        """Return the probability that the next turn comes; None where nothing was learned of the chain."""
        ...


class KeepRecent:
    """Least recently used first; learns nothing."""

    keep = Keep.WHILE_RECENT

    def left(self, chain: IdleChain, last: BlockName) -> None:
        pass

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        return None

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        return -age

    def probability(self, chain: IdleChain, age: float) -> float | None:
        return None
