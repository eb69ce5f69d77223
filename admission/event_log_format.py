"""Each version of the event log has its way to write moments, checksums and tokens, in which it is written once more.

| version | moments and durations | checksum | tokens that could not be drawn | blocks of the prefix cache |
|---|---|---|---|---|
| 13 | whole nanoseconds as an integer, others in seconds | over bytes | told by their sequences' ids | told |

Whole nanoseconds are written in under half of the instructions that the shortest decimal of a float takes, and a
checksum over bytes in an eighth of those over text.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

NANOSECONDS = 1e9  # in a second


@dataclass(frozen=True, slots=True)
class Format:
    """One version of the log, as far as versions differ."""

    version: int
    moment: Callable[[float], str]  # from seconds to what a log says, be it a moment or a duration
    checksum_of_slots: Callable[[list[int]], int]
    checksum: Callable[[list[int], int], int]  # over starts, continuing that over slots
    tells_failed: bool  # whether `done` has a list of the sequences for which no numbers were computed
    tells_blocks: bool  # whether arrivals end with blocks and a group, and other lines with what the prefix cache did


def _in_nanoseconds(seconds: float) -> str:
    """Returns whole nanoseconds, which is what real clocks give, and seconds where it is between two of them."""
    whole = round(seconds * NANOSECONDS)
    return f"{whole}" if whole / NANOSECONDS == seconds else f"{seconds!r}"


def in_seconds(said: float) -> float:
    """Returns in seconds what a log of any version says of a moment or a duration."""
    return said / NANOSECONDS if isinstance(said, int) else said


def _checksum_of_bytes(numbers: list[int], before: int = 0) -> int:
    """Returns the checksum over 32 bits a number, the low ones first as on all machines that this runs on."""
    return crc32(array("I", numbers), before)


FORMATS = {
    one.version: one
    for one in (
        Format(13, _in_nanoseconds, _checksum_of_bytes, _checksum_of_bytes, tells_failed=True, tells_blocks=True),
    )
}
"""The versions that can be replayed, by their numbers."""
