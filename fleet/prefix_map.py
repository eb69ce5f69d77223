"""Remembers which replica has which beginnings of prompts cached, as far as requests that went there let it know.

An entry counts until it is evicted there, the replica restarts or falls silent, or nobody has asked for it for
`LIFETIME`. The map is bounded: the entry that was asked for least recently goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_ENTRIES = 200_000
LIFETIME = 3600.0  # seconds


class PrefixMap:
    """Maps digests of beginnings to replicas; `now` is in seconds of any one clock."""

    def __init__(self, most: int = MAX_ENTRIES, lifetime: float = LIFETIME) -> None:
        self._most, self._lifetime = most, lifetime
        self._epochs: dict[str, int] = {}  # by replica; what was learned before the present one counts no more
        self._seen: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def learn(self, replica: str, digests: Iterable[bytes], now: float) -> None:
        """Note that the replica has these beginnings cached."""
        epoch = self._epochs.setdefault(replica, 0)
        for digest in digests:
            self._seen[replica, digest] = epoch, now
            self._seen.move_to_end((replica, digest))
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def evicted(self, replica: str, digests: Iterable[bytes]) -> None:
        """Note that the replica has these no more."""
        for digest in digests:
            self._seen.pop((replica, digest), None)

    def forget(self, replica: str) -> None:
        """Note that nothing is known any more of what the replica has cached."""
        self._epochs[replica] = self._epochs.get(replica, 0) + 1

    def num_cached(self, replica: str, digests: Sequence[bytes], now: float) -> int:
        """Return how many of the digests, from the first on, the replica has cached."""
        epoch, seen = self._epochs.get(replica, 0), self._seen
        for index, digest in enumerate(digests):
            entry = seen.get((replica, digest))
            if entry is None or entry[0] != epoch or now - entry[1] > self._lifetime:
                return index
        return len(digests)
