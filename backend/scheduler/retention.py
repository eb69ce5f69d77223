"""Retention: the worth of keeping the blocks of a finished sequence until the next turn of its conversation."""

from enum import StrEnum
from typing import Protocol

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import PLAIN_CHAIN, WANTED_CHAIN, IdleChain
from backend.paged_kv.prefix_cache import PrefixCache
from backend.scheduler.holdings import Holdings
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus


class KeepRule(StrEnum):
    """Eviction policy for the blocks of a finished sequence."""

    WHILE_WORTH = "while_worth"  # evictable, least worth first
    WHILE_RECENT = "while_recent"  # evictable, least recently used first
    HELD = "held"  # not evictable for new conversations while the client announced a next turn
    DROPPED = "dropped"  # freed at once


class Retention(Protocol):
    """Learns from chains left and returning turns, and rates idle chains for the cache."""

    keep: KeepRule

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Record that a finished sequence leaves this chain, whose last full block is `last`, and set the chain's
        kind.
        """
        ...

    def claim_chain(self, names: list[BlockName], now: float) -> IdleChain | None:
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

    keep = KeepRule.WHILE_RECENT

    def left(self, chain: IdleChain, last: BlockName) -> None:
        pass

    def claim_chain(self, names: list[BlockName], now: float) -> IdleChain | None:
        return None

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        return -age

    def probability(self, chain: IdleChain, age: float) -> float | None:
        return None


class BetweenTurns:
    """Reports the chains that sequences leave and the turns that arrive to retention.

    A chain claimed by a waiting sequence is evicted last.
    """

    def __init__(self, cache: PrefixCache, holdings: Holdings, retention: Retention, block_size: int) -> None:
        self._cache, self._holdings, self._retention = cache, holdings, retention
        self._block_size = block_size
        self._came: dict[Sequence, tuple[IdleChain, int]] = {}  # claims of waiting sequences, with the kind before

    def claim(self, sequence: Sequence, now: float) -> None:
        """Evict the chain that the sequence claims last, until `settled`."""
        chain = self._retention.claim_chain(sequence.block_names, now)
        if chain is not None and chain.blocks and chain.kind != WANTED_CHAIN:
            self._came[sequence] = chain, chain.kind
            self._cache.change_kind(chain, WANTED_CHAIN, now)

    def settled(self, sequence: Sequence) -> None:
        """Drop the claim of a sequence, which has been admitted or has ended: the chain has its earlier kind again."""
        chain, kind = self._came.pop(sequence, (None, PLAIN_CHAIN))
        if chain is not None and chain.blocks:
            self._cache.change_kind(chain, kind, self._holdings.now)

    def leaves(self, sequence: Sequence, *, is_named: bool) -> None:
        """Begin the chain of a sequence that has finished or was preempted."""
        keep, now = self._retention.keep, self._holdings.now
        names = sequence.block_names[: sequence.num_computed_tokens // self._block_size] if is_named else []
        if sequence.status is SequenceStatus.PREEMPTED:
            for cached in [cached for block in sequence.block_table.blocks if (cached := self._cache.at(block))]:
                cached.is_wanted = True
            chain = self._cache.begin_chain(sequence.tenant, now)
            chain.kind = WANTED_CHAIN if keep is KeepRule.WHILE_WORTH else PLAIN_CHAIN
        elif not names or sequence.finish_reason is FinishReason.FAILED:
            self._cache.begin_chain(sequence.tenant, now)
        else:
            expects = sequence.request.expects_followup
            is_held = keep is KeepRule.HELD and expects is not None
            chain = self._cache.begin_chain(sequence.tenant, now, expects, is_held)
            self._retention.left(chain, names[-1])

    def has_left(self, sequence: Sequence) -> None:
        """Drop the chain of a finished sequence where retention keeps none."""
        if self._retention.keep is KeepRule.DROPPED and sequence.status is SequenceStatus.FINISHED:
            self._cache.drop_chain()
