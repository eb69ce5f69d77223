"""When a client tries again: the rule of the `openai` package, which most clients are."""

from collections.abc import Mapping
from email.utils import mktime_tz, parsedate_tz
from math import isfinite
from random import Random
from time import time

MAX_RETRY_AFTER_SECONDS = 120.0
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 8.0


def should_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Return True if a response is worth another attempt; `headers` are in lower case."""
    after = _retry_after(headers)
    if after is not None and isfinite(after) and after > MAX_RETRY_AFTER_SECONDS:
        return False
    said = headers.get("x-should-retry")
    return said == "true" if said in ("true", "false") else status in (408, 409, 429) or status >= 500


def retry_delay(attempts: int, headers: Mapping[str, str], random: Random) -> float:
    """Return the seconds until the next attempt, after this many."""
    after = _retry_after(headers)
    if after is not None and isfinite(after) and 0 < after <= MAX_RETRY_AFTER_SECONDS:
        return after
    delay = min(FIRST_DELAY_SECONDS * 2.0 ** (attempts - 1), MAX_DELAY_SECONDS)
    return delay * (1 - 0.25 * random.random())


def _retry_after(headers: Mapping[str, str]) -> float | None:
    for name, divisor in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            return float(headers.get(name, "")) / divisor
        except ValueError:
            continue
    date = parsedate_tz(headers.get("retry-after", ""))
    try:
        return mktime_tz(date) - time() if date else None
    except (ValueError, OverflowError):
        return None
