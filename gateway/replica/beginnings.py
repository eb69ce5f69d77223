"""The beginnings of prompts that a replica has cached, by their digests, as routers are told of them.

A digest stands for so many bytes of a prompt, and so for about as large a part of its tokens: it is cached as long as
the block that holds the last of them is.
"""

from collections import OrderedDict, deque
from itertools import islice
from typing import Any

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.prefix_cache import CachedBlock, PrefixCache
from backend.scheduler.sequence import Sequence
from gateway.replica.digests import BLOCK
from gateway.replica.fleet_secret import Beginnings
from gateway.replica.state import Changes

MAX_KNOWN = 20_000  # digests; the one that was asked for least recently is forgotten
MAX_EVENTS = 20_000  # that are remembered for routers that ask what has changed


class CachedBeginnings:
    """Follows one prefix cache, from the first prompt that a router has sent."""

    def __init__(self, cache: PrefixCache[Any], block_size: int) -> None:
        self._cache, self._block_size = cache, block_size
        self._names: OrderedDict[bytes, BlockName] = OrderedDict()  # by digest
        self._digests: dict[BlockName, set[bytes]] = {}
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=MAX_EVENTS)  # the newest; whether it is cached now
        self._num_events = 0
        self._is_following = False

    def __len__(self) -> int:
        return len(self._names)

    def computed(self, beginnings: Beginnings, sequence: Sequence) -> None:
        """Note the beginnings of a sequence's prompt, as far as its blocks are cached."""
        if not self._is_following:
            self._follow()
        names, tokens_a_byte = sequence.block_names, len(sequence.prompt) / max(beginnings.num_bytes, 1)
        for index, digest in enumerate(beginnings.digests):
            block = int((index + 1) * BLOCK * tokens_a_byte) // self._block_size - 1
            if 0 <= block < len(names) and self._cache.named(names[block]) is not None:
                self._know(digest, names[block])

    def since(self, event: int) -> Changes:
        """Return what has changed since an event, or all that is known if that is too long ago, or never was."""
        newest, first = self._num_events, self._num_events - len(self._events)
        if event == newest:
            return Changes(newest, (), (), is_all=False)
        if event == 0 or not first <= event < newest:
            return Changes(newest, [digest.hex() for digest in self._names], (), is_all=True)
        last = dict(islice(self._events, event - first, None))
        cached, evicted = ([d.hex() for d, is_cached in last.items() if is_cached is one] for one in (True, False))
        return Changes(newest, cached, evicted, is_all=False)

    def _follow(self) -> None:
        """Have the cache tell of each block that it gives up, after whoever else is told."""
        self._is_following = True
        tell_others = self._cache.evicted

        def evicted(cached: CachedBlock[Any]) -> None:
            tell_others(cached)
            if cached.name is not None:
                for digest in self._digests.pop(cached.name, ()):
                    del self._names[digest]
                    self._happened(digest, False)

        self._cache.evicted = evicted

    def _know(self, digest: bytes, name: BlockName) -> None:
        before = self._names.pop(digest, None)
        if before != name:
            self._forget(digest, before)
            self._digests.setdefault(name, set()).add(digest)
            self._happened(digest, True)
        self._names[digest] = name
        if len(self._names) > MAX_KNOWN:
            oldest, its_name = self._names.popitem(last=False)
            self._forget(oldest, its_name)
            self._happened(oldest, False)

    def _forget(self, digest: bytes, name: BlockName | None) -> None:
        if name is not None and (same := self._digests.get(name)) is not None:
            same.discard(digest)
            if not same:
                del self._digests[name]

    def _happened(self, digest: bytes, is_cached: bool) -> None:
        self._events.append((digest, is_cached))
        self._num_events += 1
