"""Time series of the last seconds: requests, tokens, latencies, load.

A single second has few samples, of which the median and the 99th percentile are often one and the same. Both are
therefore taken over the `WINDOW_SECONDS` that end with each second. Requests without a first token count with their
wait so far: else an outage would look like silence.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import floor
from typing import Any

HISTORY_SECONDS = 300  # of history
BUSY_SECONDS = 10  # of the average load
WINDOW_SECONDS = 10  # of percentiles
MAX_SAMPLES = 1024  # of one second and kind; further ones are ignored

Gap = tuple[float, int]
"""Seconds between two tokens, and the number of sequences with this gap."""


@dataclass(slots=True)
class Gauges:
    """Readings at the end of a second. The totals of tokens only grow."""

    running: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # by class
    waits: list[float] = field(default_factory=list)  # seconds so far, of sequences without a first token
    kv_blocks_used: int = 0
    prompt_tokens: int = 0  # in all
    output_tokens: int = 0  # in all


@dataclass(slots=True)
class Point:
    """Figures of one second; None where there is nothing to show."""

    requests: int | None = None
    refused: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    oldest_wait: float | None = None  # of requests without a first token; 0: none
    running: int | None = None
    kv_blocks_used: int | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    busy: float = 0.0


NUMBERS = tuple(name for name in Point.__slots__ if name not in ("waiting", "busy"))


class RecentSeries:
    """Collects events as they happen; `tick`, called about once a second, closes the past seconds.

    `clock` is in seconds and never goes backwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = floor(clock())
        self._points: deque[Point] = deque([Point()] * HISTORY_SECONDS, HISTORY_SECONDS)
        self._gauges = Gauges()
        self._recent = _RecentSamples(), _RecentSamples()  # first tokens and gaps
        self._begin()

    @property
    def oldest_wait(self) -> float:
        """The longest wait of a sequence without a first token, in seconds, as of the last tick."""
        return max(self._gauges.waits, default=0.0)

    def _begin(self) -> None:
        self._requests = self._refused = 0
        self._busy = 0.0
        self._ttfts: list[float] = []
        self._gaps: list[Gap] = []

    def request_ended(self, is_refused: bool) -> None:
        self._requests += 1
        self._refused += is_refused

    def first_token(self, seconds: float) -> None:
        if len(self._ttfts) < MAX_SAMPLES:
            self._ttfts.append(seconds)

    def step(self, elapsed: float, gap: float, num_decodes: int) -> None:
        """Count a step of `elapsed` seconds of device time, whose decodes had their last token `gap` seconds before."""
        self._busy += elapsed
        if num_decodes and len(self._gaps) < MAX_SAMPLES:
            self._gaps.append((gap, num_decodes))

    def tick(self, gauges: Gauges) -> None:
        """Close the past seconds. If there are several, all events since are counted in the last."""
        now = floor(self._clock())
        passed = now - self._second
        if passed <= 0:
            return
        self._points.extend([Point()] * min(passed - 1, HISTORY_SECONDS))
        self._points.append(self._closed(gauges, passed))
        self._second, self._gauges = now, gauges
        self._begin()

    def _closed(self, gauges: Gauges, passed: int) -> Point:
        before = self._gauges
        ttfts, gaps = self._recent
        ttft_p50, ttft_p99 = _with_waits(ttfts.add([(seconds, 1) for seconds in self._ttfts], passed), gauges.waits)
        gap_p50, gap_p99 = median_and_p99(gaps.add(self._gaps, passed))
        return Point(
            self._requests,
            self._refused,
            gauges.prompt_tokens - before.prompt_tokens,
            gauges.output_tokens - before.output_tokens,
            ttft_p50,
            ttft_p99,
            gap_p50,
            gap_p99,
            max(gauges.waits, default=0.0),
            gauges.running,
            gauges.kv_blocks_used,
            gauges.waiting,
            min(self._busy / passed, 1.0),
        )

    @property
    def busy(self) -> float:
        """Share of the last seconds in which the device computed."""
        points = list(self._points)[-BUSY_SECONDS:]
        return sum(point.busy for point in points) / len(points)

    def to_json(self, end: float, classes: Iterable[str]) -> dict[str, Any]:
        """The series; `end` is now, in Unix seconds. All of `classes` appear, also those without waits."""
        points = list(self._points)
        seconds: dict[str, Any] = {name: [getattr(point, name) for point in points] for name in NUMBERS}
        names = dict.fromkeys([*classes, *(name for point in points for name in point.waiting)])
        seconds["waiting"] = {name: [_waiting(point, name) for point in points] for name in names}
        return {"seconds": 1, "end": floor(end), "points": seconds}


class _RecentSamples:
    """Keeps the samples of the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._seconds: deque[list[Gap]] = deque(maxlen=WINDOW_SECONDS)

    def add(self, samples: list[Gap], passed: int) -> list[Gap]:
        """Add the samples of a second, `passed` seconds after the last; returns all of the window, in sorted runs."""
        self._seconds.extend([] for _ in range(min(passed, WINDOW_SECONDS) - 1))
        self._seconds.append(sorted(samples))
        return [sample for second in self._seconds for sample in second]


def _with_waits(samples: list[Gap], waits: list[float]) -> tuple[float | None, float | None]:
    """The median and the 99th percentile of times to first token, pending waits included.

    Each figure is the larger of the arrived tokens' and of both kinds' together. A wait is less than the final time to
    first token, so neither figure is too long.
    """
    got = median_and_p99(samples)
    some = waits[:: 1 + len(waits) // MAX_SAMPLES]  # in no particular order
    both = median_and_p99([*samples, *((wait, 1) for wait in some)])
    return _longer(got[0], both[0]), _longer(got[1], both[1])


def _longer(one: float | None, other: float | None) -> float | None:
    return max((seconds for seconds in (one, other) if seconds is not None), default=None)


def _waiting(point: Point, name: str) -> int | None:
    return None if point.running is None else point.waiting.get(name, 0)


def median_and_p99(samples: list[Gap]) -> tuple[float | None, float | None]:
    """The weighted median and 99th percentile; sorts the samples in place."""
    samples.sort()
    total = sum(weight for _, weight in samples)
    return _quantile(samples, 0.5 * total), _quantile(samples, 0.99 * total)


def _quantile(samples: list[Gap], weight: float) -> float | None:
    for value, times in samples:
        weight -= times
        if weight <= 0:
            return value
    return None
