"""Maps beginnings of prompts to the replicas that have them cached, as far as requests there revealed them.

An entry counts until it is evicted there, the replica restarts or falls silent, or no request has looked it up for
`LIFETIME_SECONDS`. The map is bounded and evicts the least recently used entry.

Bytes cached behind a prompt's last digest count for prompts whose last known digest is the same.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from gateway.replica.digests import BLOCK_BYTES

MAX_BLOCK_ENTRIES = 200_000
LIFETIME_SECONDS = 3600.0


class PrefixMap:
    """Maps digests of beginnings to replicas; `now` is in seconds of any one clock."""

    def __init__(self, most: int = MAX_BLOCK_ENTRIES, lifetime: float = LIFETIME_SECONDS) -> None:
        self._most, self._lifetime = most, lifetime
        self._epochs: dict[str, int] = {}  # by replica; entries of earlier epochs are invalid
        self._seen: OrderedDict[tuple[str, bytes], tuple[int, float, int]] = OrderedDict()  # with the bytes behind it

    def __len__(self) -> int:
        return len(self._seen)

    def learn(
        self, replica: str, digests: Iterable[bytes], now: float, behind: Mapping[bytes, int] | None = None
    ) -> None:
        """Record cached beginnings of the replica, and the bytes cached `behind` each of them. None: the bytes behind
        them are unchanged.
        """
        epoch = self._epochs.setdefault(replica, 0)
        for digest in digests:
            key = replica, digest
            if behind is not None:
                more = behind.get(digest, 0)
            else:
                before = self._seen.get(key)
                more = before[2] if before is not None and before[0] == epoch else 0
            self._seen[key] = epoch, now, more
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def evicted(self, replica: str, digests: Iterable[bytes]) -> None:
        """Record evictions at the replica."""
        for digest in digests:
            self._seen.pop((replica, digest), None)

    def forget(self, replica: str) -> None:
        """Forget the replica's cache."""
        self._epochs[replica] = self._epochs.get(replica, 0) + 1

    def cached_bytes(self, replica: str, digests: Sequence[bytes], now: float) -> int:
        """Bytes that the replica has cached of a prompt with these digests, from its beginning; perhaps more than the
        prompt has.
        """
        epoch, seen, found, behind = self._epochs.get(replica, 0), self._seen, 0, 0
        for digest in digests:
            entry = seen.get((replica, digest))
            if entry is None or entry[0] != epoch or now - entry[1] > self._lifetime:
                break
            found, behind = found + BLOCK_BYTES, entry[2]
        return found + behind
