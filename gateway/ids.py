"""Ids of requests and responses: random behind their second, so that an index of them grows at its end."""

import time
from os import urandom

SECOND_BYTES = 4  # as wide as the second of any id until 2106


def new_id(kind: str, num_bytes: int = 16) -> str:
    """An id that nobody guesses: `kind`, then twice as many hexadecimal digits as bytes."""
    return f"{kind}{int(time.time()):08x}{urandom(num_bytes - SECOND_BYTES).hex()}"
