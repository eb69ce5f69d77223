"""Stored values that are none of ours, as after a restore by hand: readers leave them out, and tell them."""

import logging
import struct
from functools import lru_cache

from redis.exceptions import ResponseError

log = logging.getLogger(__name__)

DAMAGE = (ResponseError, struct.error, ValueError, OverflowError)
"""What reading a damaged value raises: a key of another type, bytes of another length, no number."""


@lru_cache(10_000)  # each is told once, not at every look
def tell(place: bytes | str, why: str) -> None:
    """Log that the value at a place, such as a key of the quota store, is damaged."""
    name = place.decode(errors="replace") if isinstance(place, bytes) else place
    log.warning("the stored value %s is damaged, and left out: %s", name, why)
