"""Between the turns of a conversation its blocks are an idle chain, which the next turn claims."""

from backend.paged_kv.idle_blocks import PLAIN, WANTED, IdleChain
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.holdings import Holdings
from backend.scheduler.retention import Keep, KeepRecent, Retention
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.scheduler.swapping import Swapping


class BetweenTurns:
    """Reports the chains that sequences leave and the turns that arrive to retention, and its ratings to the cache.

    A chain claimed by a waiting sequence is evicted last.
    """

    def __init__(self, cache: PrefixCache, holdings: Holdings, swapping: Swapping, block_size: int) -> None:
        self._cache, self._holdings, self._swapping = cache, holdings, swapping
        self._block_size = block_size
        self._retention: Retention = KeepRecent()
        self._came: dict[Sequence, tuple[IdleChain, int]] = {}  # claims of waiting sequences, with the kind before

    def keep_by(self, retention: Retention) -> None:
        """Rate idle chains by this retention."""
        self._retention = retention
        if retention.keep is Keep.WHILE_WORTH:
            self._cache.worth, self._swapping.forecast = self._worth, self._probability

    def arrived(self, sequence: Sequence, now: float) -> None:
        """Evict the chain that the sequence claims last, until `settled`."""
        chain = self._retention.arrived(sequence.block_names, now)
        if chain is not None and chain.blocks and chain.kind != WANTED:
            self._came[sequence] = chain, chain.kind
            self._cache.change_kind(chain, WANTED, now)

    def settled(self, sequence: Sequence) -> None:
        """Drop the claim of a sequence, which has been admitted or has ended: the chain has its earlier kind again."""
        chain, kind = self._came.pop(sequence, (None, PLAIN))
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
            chain.kind = WANTED if keep is Keep.WHILE_WORTH else PLAIN
        elif not names or sequence.finish_reason is FinishReason.FAILED:
            self._cache.begin_chain(sequence.tenant, now)
        else:
            expects = sequence.request.expects_followup
            is_held = keep is Keep.HELD and expects is not None
            chain = self._cache.begin_chain(sequence.tenant, now, expects, is_held)
            self._retention.left(chain, names[-1])

    def has_left(self, sequence: Sequence) -> None:
        if self._retention.keep is Keep.DROPPED and sequence.status is SequenceStatus.FINISHED:
            self._cache.drop_chain()

    def _worth(self, kind: int, chain: IdleChain) -> float:
        return self._retention.worth(kind, chain, self._holdings.now - chain.left_at)

    def _probability(self, cached: CachedBlock) -> float | None:
        chain = cached.chain
        if chain is None or cached.is_common:
            return None
        return self._retention.probability(chain, self._holdings.now - chain.left_at)
