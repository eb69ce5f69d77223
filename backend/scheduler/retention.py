"""Retention: the worth of keeping the blocks of a finished sequence until the next turn of its conversation."""

from typing import Protocol

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import PLAIN_CHAIN, WANTED_CHAIN, IdleChain
from backend.paged_kv.prefix_cache import PrefixCache
from backend.scheduler.holdings import Holdings
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus


class Retention(Protocol):
    """Learns from chains left and returning turns, and rates idle chains for the cache. Without one the least recently
    used chain is evicted first.
    """

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

    def probability(self, chain: IdleChain, age: float) -> float:
        """Return the probability that the next turn comes."""
        ...


class BetweenTurns:
    """Reports the chains that sequences leave and the turns that arrive to retention.

    A chain claimed by a waiting sequence is evicted last.
    """

    def __init__(self, cache: PrefixCache, holdings: Holdings, retention: Retention | None, block_size: int) -> None:
        self._cache, self._holdings, self._retention = cache, holdings, retention
        self._block_size = block_size
        self._came: dict[Sequence, tuple[IdleChain, int]] = {}  # claims of waiting sequences, with the kind before

    def claim(self, sequence: Sequence, now: float) -> None:
        """Evict the chain that the sequence claims last, until `settled`."""
        retention = self._retention
        chain = None if retention is None else retention.claim_chain(sequence.block_names, now)
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
        retention, now = self._retention, self._holdings.now
        names = sequence.block_names[: sequence.num_computed_tokens // self._block_size] if is_named else []
        if sequence.status is SequenceStatus.PREEMPTED:
            text = sequence.block_table
            held = [*text.blocks, *(text.window.blocks if text.window else ())]
            for cached in [cached for block in held if (cached := self._cache.at(block))]:
                cached.is_wanted = True
            chain = self._cache.begin_chain(sequence.tenant, now)
            chain.kind = PLAIN_CHAIN if retention is None else WANTED_CHAIN
        elif not names or retention is None or sequence.finish_reason is FinishReason.FAILED:
            self._cache.begin_chain(sequence.tenant, now)
        else:
            chain = self._cache.begin_chain(sequence.tenant, now, sequence.request.expects_followup)
            retention.left(chain, names[-1])
