"""Reads how long the client of a request to generate will wait.

The client's patience is read from its headers, of which the tightest holds:

x-sluice-ttft-ms             until the first token              ms from now
x-sluice-deadline-ms         until the last                     ms from now
x-sluice-deadline-at         until the last                     a moment: RFC 3339, or Unix seconds
x-request-timeout-seconds    until the last                     Ray
x-llm-d-slo-ttft-ms          until the first token              llm-d
x-llm-d-slo-tpot-ms          between two tokens                 llm-d
x-stainless-read-timeout     the longest silence, in seconds    openai: an answer in one piece is silent until its last
                                                                token, a stream until its first and between tokens

x-sluice-expect-followup says in how many seconds after the answer the client comes with the next turn.
"""

from collections.abc import Iterable
from datetime import datetime
from math import inf, isfinite

from gateway.api.engine_request import ClientDeadlines
from gateway.errors import BadRequest
from gateway.quoting import quoted

FOLLOWUP, MAX_FOLLOWUP_SECONDS = b"x-sluice-expect-followup", 3600.0  # seconds
MAX_DEADLINE_SECONDS = 30 * 86_400.0  # a longer wait is taken for no deadline
READ_TIMEOUT = b"x-stainless-read-timeout"
FIRST, LAST, INTERVAL = "first", "last", "interval"
Headers = Iterable[tuple[bytes, bytes]]
NONE = ClientDeadlines()


def read_deadlines(headers: Headers, stream: bool, now: float) -> ClientDeadlines:
    """Returns the tightest deadlines of the headers; `now` is in Unix seconds. Raises `BadRequest` for a wrong one."""
    given = [(name, value) for name, value in headers if name in _NAMES]
    return _tightest(given, stream, now) if given else NONE


def read_expected_followup(headers: Headers) -> float | None:
    """Seconds from the answer to the client's announced next turn; None: none is announced. Raises `BadRequest` if the
    header is no number of seconds, or above an hour.
    """
    given = [value for name, value in headers if name == FOLLOWUP]
    if not given:
        return None
    seconds = _number(given[-1])
    if not 0 < seconds <= MAX_FOLLOWUP_SECONDS:
        most = f"{MAX_FOLLOWUP_SECONDS:.0f}"
        raise _wrong(FOLLOWUP, given[-1], f"seconds, a number above 0 and at most {most}; leave it out if none follows")
    return seconds


def _tightest(headers: Headers, stream: bool, now: float) -> ClientDeadlines:
    tightest = {FIRST: inf, LAST: inf, INTERVAL: inf}
    absolute = inf
    for name, value in headers:
        if name == READ_TIMEOUT:
            seconds = _duration(name, value, 1.0)
            for what in (FIRST, INTERVAL) if stream else (LAST,):
                tightest[what] = min(tightest[what], seconds)
        elif name == b"x-sluice-deadline-at":
            absolute = _until(name, value, now)
        else:
            what, unit = _DURATIONS[name]
            tightest[what] = min(tightest[what], _duration(name, value, unit))
    is_relative = absolute >= tightest[LAST]
    return ClientDeadlines(tightest[FIRST], min(tightest[LAST], absolute), tightest[INTERVAL], is_relative)


_DURATIONS = {
    b"x-sluice-ttft-ms": (FIRST, 1e-3),
    b"x-sluice-deadline-ms": (LAST, 1e-3),
    b"x-request-timeout-seconds": (LAST, 1.0),
    b"x-llm-d-slo-ttft-ms": (FIRST, 1e-3),
    b"x-llm-d-slo-tpot-ms": (INTERVAL, 1e-3),
}


_NAMES = {*_DURATIONS, b"x-sluice-deadline-at", READ_TIMEOUT}


def _duration(name: bytes, value: bytes, unit: float) -> float:
    seconds = _number(value) * unit
    if not seconds > 0:
        raise _wrong(name, value, "a number above 0")
    return seconds if seconds <= MAX_DEADLINE_SECONDS else inf


def _until(name: bytes, value: bytes, now: float) -> float:
    seconds = _unix(value) - now
    if not isfinite(seconds):
        raise _wrong(name, value, "a moment such as 2027-01-31T12:00:00Z, or Unix seconds")
    return max(seconds, 0.0) if seconds <= MAX_DEADLINE_SECONDS else inf


def _unix(value: bytes) -> float:
    number = _number(value)
    if isfinite(number):
        return number
    try:
        moment = datetime.fromisoformat(value.decode("ascii"))
    except ValueError:
        return inf
    return moment.timestamp() if moment.tzinfo else inf


def _number(value: bytes) -> float:
    """Returns the number, or NaN for a value that is no plain finite one."""
    text = value.strip()
    is_plain = len(text) <= 32 and text.replace(b".", b"", 1).isdigit()
    return float(text) if is_plain else float("nan")


def _wrong(name: bytes, value: bytes, expected: str) -> BadRequest:
    header = name.decode()
    return BadRequest(f"The header {header} must be {expected}, got {quoted(value.decode('latin-1'), 64)}.", header)
