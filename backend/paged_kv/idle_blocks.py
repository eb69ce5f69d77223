"""The idle blocks of one tenant, in the order of eviction.

The blocks that one holder left are a chain: the next turn of a conversation reuses all of it, or none. The tenant's
chain of least worth is evicted first, its last block before its earlier ones. A prefix that several conversations share
stays as long as any chain that follows on it.

The victim among tenants is not chosen here, nor by worth: blocks have stamps of the time when they were left, and an
eviction takes the tenant's oldest stamp, for any block. So a tenant has idle blocks of the same number and age as under
least recently used, and hints about its own blocks do not affect other tenants.

An example: chain P is left at stamp 1 with three blocks, chain Q at stamp 2 with two. An eviction of two blocks takes
two stamps of 1, and gives up both blocks of Q if those are worth less. P then has three blocks and one stamp of its
own, Q's two stamps stand for the two others, and the tenant's oldest stamp is 1.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from sys import maxsize
from typing import Generic, Protocol, TypeVar

PLAIN_CHAIN, WANTED_CHAIN, COMMON_CHAIN = 0, -1, -2
"""Kinds of chains: without a hint, of a preempted sequence that will come back, and shared by several. Kinds above 0
are the caller's, one for chains that are expected back at similar times.
"""


class Block(Protocol):
    """A cached block, as far as this module knows it."""

    block: int
    chain: "IdleChain | None"  # its chain, or its last one while it is not idle
    is_common: bool


class IdleChain:
    """The blocks that one holder left at a time and that no sequence has taken since."""

    __slots__ = ("blocks", "expects", "is_behind", "kind", "left_at", "num_stamps", "stamp", "tenant")

    def __init__(self, tenant: str, kind: int, expects: float | None, left_at: float, stamp: int) -> None:
        self.blocks: dict[int, Block] = {}  # each follows on the next
        self.tenant = tenant
        self.kind, self.expects = kind, expects  # seconds until the announced return; None: none was announced
        self.left_at = left_at  # seconds of the engine's clock
        self.stamp = stamp  # the cache's count of chains when this one was left
        self.num_stamps = 0  # copies of this stamp among its tenant's
        self.is_behind = False  # a window has left it, whose sequence goes on


B = TypeVar("B", bound=Block)

Worth = Callable[[int, IdleChain], float]
"""The worth of keeping a block of a chain, taken for a chain of this kind: the least is evicted first."""


class IdleBlocks(Generic[B]):
    """One tenant's idle blocks. Adding and taking a block is O(1), choosing the victim chain O(kinds of chains)."""

    def __init__(self, worth: Worth | None) -> None:
        """`worth` rates chains; None: the least recently used is evicted first."""
        self._worth = worth
        self._num = 0
        self._chains: dict[int, OrderedDict[IdleChain, None]] = {}  # by kind, in the order in which they were left
        self._left: OrderedDict[IdleChain, None] = OrderedDict()  # all chains, the first that was left first
        self._common: OrderedDict[int, B] = OrderedDict()  # blocks that several chains follow on, the first left first
        # Chains with stamps, the oldest first. A chain has as many stamps as blocks until an eviction: from then on
        # only the sums over all chains are equal, and a chain without stamps borrows the oldest (`take`).
        self._stamps: deque[IdleChain] = deque()
        self._giving_way: IdleChain | None = None  # a chain whose eviction has begun is evicted to its end

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[B]:
        for chain in self._left:
            yield from chain.blocks.values()  # type: ignore[misc]
        yield from self._common.values()

    @property
    def oldest(self) -> int:
        """The oldest stamp; there is at least one block."""
        return self._stamps[0].stamp

    def add(self, blocks: list[B], chain: IdleChain) -> None:
        """Add blocks that became idle to a chain; a block that other chains follow on is common."""
        own, common, keeps_common = chain.blocks, self._common, self._worth is not None
        was_empty = not own
        for cached in blocks:
            before = cached.chain
            if keeps_common and (cached.is_common or (before is not None and before.blocks and before is not chain)):
                cached.is_common = True  # others follow on it, which its holder did not take
                common[cached.block] = cached
            else:
                own[cached.block] = cached
            cached.chain = chain
        if own and was_empty:
            self._chains.setdefault(chain.kind, OrderedDict())[chain] = None
            self._left[chain] = None
        if blocks and not chain.num_stamps:
            self._stamps.append(chain)
        chain.num_stamps += len(blocks)
        self._num += len(blocks)

    def take(self, cached: B) -> None:
        """Remove a block, which has a holder again or is pinned."""
        chain = cached.chain
        assert chain is not None
        if chain.blocks.pop(cached.block, None) is None:
            del self._common[cached.block]
        elif not chain.blocks:
            self._forget(chain)
        self._num -= 1
        self._unstamp(chain if chain.num_stamps else self._stamps[0], 1)

    def change_kind(self, chain: IdleChain, kind: int, now: float) -> None:
        """Change the kind of a chain with blocks, as if it were left now."""
        self._leave_kind(chain)
        chain.kind, chain.left_at = kind, now
        self._chains.setdefault(kind, OrderedDict())[chain] = None

    def give_up(self, most: int, newest_stamp: int) -> list[B]:
        """Remove and return the blocks of least worth, 1 to `most` of them: as many as there are stamps up to
        `newest_stamp`, at least one; 0: stamps of any age.
        """
        left = most
        while left and self._stamps and (left == most or not newest_stamp or self.oldest <= newest_stamp):
            left -= self._unstamp(self._stamps[0], left)
        count, given_up = most - left, list[B]()
        while count:
            blocks = self._next(count)
            given_up += blocks
            count -= len(blocks)
        return given_up

    def _next(self, count: int) -> list[B]:
        chain = self._giving_way or self._choose()
        if chain is None:
            first = next(iter(self._left)).stamp if self._left else maxsize
            blocks = [one for one in islice(self._common.values(), count) if _stamp(one) < first]
            for one in blocks:
                del self._common[one.block]
        elif count < len(chain.blocks):
            blocks = list(islice(chain.blocks.values(), count))  # type: ignore[arg-type]
            for one in blocks:
                del chain.blocks[one.block]
            self._giving_way = chain
        else:
            blocks = list(chain.blocks.values())  # type: ignore[arg-type]
            chain.blocks.clear()
            self._forget(chain)
        self._num -= len(blocks)
        return blocks

    def _choose(self) -> IdleChain | None:
        """Return the chain of least worth; None: the first common block is worth less than any chain.

        A common block may go only once no chain follows on it: it was left before all chains that are idle now. Within
        a kind, worth rises with age, falls, or first rises and then falls: the first chain or the last has the least.
        """
        chosen, least = None, 0.0
        for kind, chains in self._chains.items():
            first = next(iter(chains))
            for chain in (first, next(reversed(chains))) if self._worth else (first,):
                worth = self._worth(kind, chain) if self._worth else float(chain.stamp)
                if chosen is None or (worth, chain.stamp) < (least, chosen.stamp):
                    chosen, least = chain, worth
        if self._common:
            shared = next(iter(self._common.values())).chain
            assert shared is not None and self._worth is not None
            oldest = next(iter(self._left), None)
            if oldest is None or (shared.stamp < oldest.stamp and self._worth(COMMON_CHAIN, shared) < least):
                return None
        return chosen

    def _forget(self, chain: IdleChain) -> None:
        del self._left[chain]
        self._leave_kind(chain)

    def _leave_kind(self, chain: IdleChain) -> None:
        chains = self._chains[chain.kind]
        del chains[chain]
        if not chains:
            del self._chains[chain.kind]
        if self._giving_way is chain:
            self._giving_way = None

    def _unstamp(self, chain: IdleChain, most: int) -> int:
        """Remove at most `most` stamps of a chain; return their number."""
        count = min(most, chain.num_stamps)
        chain.num_stamps -= count
        while self._stamps and not self._stamps[0].num_stamps:
            self._stamps.popleft()
        return count

    def check_integrity(self) -> None:
        """Assert that chains, blocks and stamps agree."""
        blocks = list(self)
        assert len(blocks) == self._num == sum(chain.num_stamps for chain in set(self._stamps)), "blocks were lost"
        assert all(chain.blocks for chain in self._left), "a chain without blocks"
        assert self._left.keys() == {one for kind in self._chains.values() for one in kind}, "a chain of no kind"
        for chains in self._chains.values():
            assert [chain.left_at for chain in chains] == sorted(chain.left_at for chain in chains), "out of order"
        common = [_stamp(one) for one in self._common.values()]
        assert common == sorted(common), "what several share is out of order"


def _stamp(cached: Block) -> int:
    assert cached.chain is not None
    return cached.chain.stamp
