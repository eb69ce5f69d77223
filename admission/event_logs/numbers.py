"""How an event log writes moments and checksums.

Whole nanoseconds are written in under half of the instructions that the shortest decimal of a float takes, and a
checksum over bytes in an eighth of those over text.
"""

from array import array
from zlib import crc32

NANOSECONDS = 1e9  # in a second


def moment(seconds: float) -> str:
    """Returns what a log says of a moment or a duration: whole nanoseconds, which is what real clocks give, and seconds
    where it is between two of them.
    """
    whole = round(seconds * NANOSECONDS)
    return f"{whole}" if whole / NANOSECONDS == seconds else f"{seconds!r}"


def in_seconds(said: int | float) -> float:
    """Returns in seconds what a log says of a moment or a duration."""  # compiled, a `float` would never be an `int`
    return said / NANOSECONDS if isinstance(said, int) else said


def checksum(numbers: list[int], before: int = 0) -> int:
    """Returns the checksum over 32 bits a number, the low ones first as on all machines that this runs on; it continues
    the one `before`.
    """
    return crc32(array("I", numbers), before)
