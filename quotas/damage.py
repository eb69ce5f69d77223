"""Tells of stored values that are none of ours, as after a restore by hand: readers leave them out."""

import logging
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache(10_000)  # each is told once, not at every look
def tell(place: bytes | str, why: str) -> None:
    """Log that the value at a place, such as a key of the quota store, is damaged."""
    name = place.decode(errors="replace") if isinstance(place, bytes) else place
    log.warning("the stored value %s is damaged, and left out: %s", name, why)
