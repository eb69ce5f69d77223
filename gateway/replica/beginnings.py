"""The cached beginnings of prompts, by their digests, as a replica tells routers.

A digest stands for a fixed number of a prompt's bytes, and so for about the same part of its tokens: it is cached as
long as the block with the last of these tokens.

The tail of a prompt behind its last digest, and the answer, have no digest; the next turn of the conversation begins
with both. The number of their cached bytes is told for that digest while only one conversation has ended there: for
prompts that share no more than a system prompt, nothing is told.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.sequence import Sequence
from gateway.replica.digests import BLOCK_BYTES
from gateway.replica.fleet_secret import Beginnings
from gateway.replica.state import Changes

MAX_KNOWN_DIGESTS = 20_000  # the least recently used one is forgotten
MAX_EVENTS = 20_000  # kept for routers that ask for changes


class _Tail(NamedTuple):
    """The cached blocks behind the last digest of a prompt."""

    last: BlockName
    num_tokens: int  # from the beginning of the prompt to the end of that block
    num_bytes: int  # behind the digest, as bytes of the next turn's body


class CachedBeginnings:
    """Follows one prefix cache, from the first prompt that a router has sent."""

    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        self._cache, self._block_size = cache, block_size
        self._names: OrderedDict[bytes, BlockName] = OrderedDict()  # by digest
        self._tails: dict[bytes, _Tail] = {}  # by digest
        self._digests: dict[BlockName, set[bytes]] = {}  # digests that end with a block, or whose tails do
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=MAX_EVENTS)  # the newest; whether it is cached now
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._names)

    def computed(self, beginnings: Beginnings, sequence: Sequence) -> None:
        """Record the cached beginnings of a sequence's prompt."""
        self._cache.add_feature(self)
        names, tokens_a_byte = sequence.block_names, sequence.num_prompt_tokens / max(beginnings.num_bytes, 1)
        digests = beginnings.digests
        may_have_tail = bool(digests) and self._is_alone(digests[-1], sequence)
        for index, digest in enumerate(digests):
            block = int((index + 1) * BLOCK_BYTES * tokens_a_byte) // self._block_size - 1
            self._cut(digest)
            if 0 <= block < len(names) and self._cache.named(names[block]) is not None:
                self._know(digest, names[block])
        if may_have_tail:
            self._append(digests[-1], sequence, len(digests) * BLOCK_BYTES, tokens_a_byte)

    def _is_alone(self, digest: bytes, sequence: Sequence) -> bool:
        """True if only earlier turns of this conversation are known with this digest."""
        tail = self._tails.get(digest)
        if tail is None:
            return digest not in self._names
        return sequence.num_cached_tokens >= tail.num_tokens

    def _append(self, digest: bytes, sequence: Sequence, begins: int, tokens_a_byte: float) -> None:
        """Record the cached bytes of a sequence behind its prompt's last digest, which ends at byte `begins`."""
        names, cache = sequence.block_names, self._cache
        cached = next((n for n in range(len(names), 0, -1) if cache.named(names[n - 1]) is not None), 0)
        tokens = cached * self._block_size
        num_bytes = int(tokens / tokens_a_byte) - begins
        if digest in self._names and num_bytes > 0:
            self._tails[digest] = _Tail(names[cached - 1], tokens, num_bytes)
            self._digests.setdefault(names[cached - 1], set()).add(digest)
            self._happened(digest, True)

    def _cut(self, digest: bytes) -> None:
        """Forget the tail behind a digest."""
        tail = self._tails.pop(digest, None)
        if tail is not None:
            if tail.last != (own := self._names.get(digest)):
                self._forget(digest, tail.last)
            if own is not None:
                self._happened(digest, True)

    def since(self, event: int) -> Changes:
        """The changes since an event, or the whole state if that is too long ago or unknown."""
        newest, first = self._num_events, self._num_events - len(self._events)
        if event == newest:
            return Changes(newest, (), (), is_all=False)
        if event == 0 or not first <= event < newest:
            return Changes(newest, [d.hex() for d in self._names], (), is_all=True, behind=self._behind(self._names))
        last = dict(islice(self._events, event - first, None))
        cached, evicted = ([d.hex() for d, is_cached in last.items() if is_cached is one] for one in (True, False))
        return Changes(newest, cached, evicted, is_all=False, behind=self._behind(last))

    def _behind(self, digests: Iterable[bytes]) -> dict[str, int]:
        return {digest.hex(): self._tails[digest].num_bytes for digest in digests if digest in self._tails}

    def becomes_idle(self, cached: CachedBlock) -> bool:
        return False

    def reused(self, cached: CachedBlock) -> None:
        pass

    def evicted(self, cached: CachedBlock) -> None:
        """Forget what the block was the last of."""
        if cached.name is None:
            return
        for digest in self._digests.pop(cached.name, ()):
            is_evicted = self._names[digest] == cached.name
            if is_evicted:
                del self._names[digest]
            self._cut(digest)
            if is_evicted:
                self._happened(digest, False)

    def _know(self, digest: bytes, name: BlockName) -> None:
        before = self._names.pop(digest, None)
        if before != name:
            self._forget(digest, before)
            self._digests.setdefault(name, set()).add(digest)
            self._happened(digest, True)
        self._names[digest] = name
        if len(self._names) > MAX_KNOWN_DIGESTS:
            oldest, its_name = self._names.popitem(last=False)
            self._forget(oldest, its_name)
            self._cut(oldest)
            self._happened(oldest, False)

    def _forget(self, digest: bytes, name: BlockName | None) -> None:
        if name is not None and (same := self._digests.get(name)) is not None:
            same.discard(digest)
            if not same:
                del self._digests[name]

    def _happened(self, digest: bytes, is_cached: bool) -> None:
        self._events.append((digest, is_cached))
        self._num_events += 1
