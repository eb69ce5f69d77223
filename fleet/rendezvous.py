"""Consistent hashing with bounded load: the same key goes to the same replica, from every router and after a change of
the set but for its share, unless that replica has much more to do than the others.

Each key ranks the replicas by a hash of both (Thaler and Ravishankar, 1998), and takes the first whose load is within
`BOUND` times the mean (Mirrokni et al., 2018).
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import ceil

BOUND = 1.25


def ranked(key: bytes, names: Mapping[str, int] | list[str]) -> list[str]:
    """Return the names in the key's order."""
    return sorted(names, key=lambda name: blake2b(name.encode(), key=key[:64], digest_size=8).digest())


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """Return the first name in the key's order that may have one request more."""
    most = ceil(BOUND * (sum(loads.values()) + 1) / len(loads))
    return next(name for name in ranked(key, list(loads)) if loads[name] < most)
