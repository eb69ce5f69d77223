"""The offsets of a time zone from UTC, as the store's scripts read them: see lua/level.lua."""

import time
from bisect import bisect_left
from datetime import datetime
from functools import lru_cache
from zoneinfo import ZoneInfo

from quotas.policy.limit import QUARTER_SECONDS

QUARTERS_PER_DAY = 86_400 // QUARTER_SECONDS
DAYS_BEFORE, DAYS_AFTER = 70, 1200  # of now: two months in which a charge may lie, and the longest life of a process


def zone_offsets(time_zone: str) -> str:
    """Return the offset two months ago and each later one of some years, with the quarter of an hour from which on it
    holds: "4,1971236:8", in quarters of an hour.
    """
    today = int(time.time()) // 86_400
    return offsets_between(time_zone, today - DAYS_BEFORE, today + DAYS_AFTER)


@lru_cache(maxsize=1024)
def offsets_between(time_zone: str, first_day: int, last_day: int) -> str:
    """Return the offsets of these days, counted from the Unix epoch."""
    zone = ZoneInfo(time_zone)

    def offset(quarter: int) -> int:
        known = datetime.fromtimestamp(quarter * QUARTER_SECONDS, zone).utcoffset()
        assert known is not None
        return round(known.total_seconds()) // QUARTER_SECONDS

    first, last = first_day * QUARTERS_PER_DAY, last_day * QUARTERS_PER_DAY
    present = offset(first)
    words = [str(present)]
    for begin in range(first, last, QUARTERS_PER_DAY):
        following = offset(begin + QUARTERS_PER_DAY)
        if following != present:
            day = range(begin, begin + QUARTERS_PER_DAY + 1)
            change = day[bisect_left(day, True, key=lambda quarter: offset(quarter) == following)]
            words.append(f"{change}:{following}")
            present = following
    return ",".join(words)
