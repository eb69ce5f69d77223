"""The encoding of moments and checksums in an event log.

Writing whole nanoseconds takes under half of the instructions of a float's shortest decimal, and a checksum over bytes
an eighth of one over text.
"""

from array import array
from zlib import crc32

NANOSECONDS_PER_S = 1e9


def moment(seconds: float) -> str:
    """Return the log's form of a moment or a duration: whole nanoseconds, which real clocks give, and seconds for a
    value between two of them.
    """
    whole = round(seconds * NANOSECONDS_PER_S)
    return f"{whole}" if whole / NANOSECONDS_PER_S == seconds else f"{seconds!r}"


def in_seconds(said: int | float) -> float:
    """Return the seconds of a logged moment or duration."""  # compiled, a `float` would never be an `int`
    return said / NANOSECONDS_PER_S if isinstance(said, int) else said


def checksum(numbers: list[int], before: int = 0) -> int:
    """Return the checksum over 32 bits a number, the low byte first as on all supported machines; it continues
    `before`.
    """
    return crc32(array("I", numbers), before)
