"""The time that tenants beyond their share leave to those within theirs, so that a flood of one costs the others
nothing: a deadline is met or missed by the queue that is found, and whoever fills it decides what others find.

A tenant's share is what max-min fairness gives it of the engine's time, by weight and by what it asks for (Bertsekas
and Gallager, 1992, 6.5.2). Whoever asks for less is within it. What such tenants would wait for each other alone is the
length of a virtual queue that only they fill; a request of a tenant beyond its share is let in where it would be in
time even behind that queue at its longest (`QUANTILE`). For what tenants within their shares find is what others have
left them, and the most that they add to it themselves is, over any time to come, distributed as that queue's length is
(Loynes, 1962): so all of them are in time but for few.

Tenants beyond their share divide what is left: each leaves as much more time free, in proportion to what it may wait,
as it has had more engine time lately than their mean.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import exp, inf
from typing import NamedTuple

LONG, SHORT = 60.0, 10.0  # seconds over which demand is averaged: the larger counts, so that a flood is seen at once
QUANTILE = 0.99  # of the virtual queue's lengths, that is left free
MEMORY = 120.0  # seconds, after which a length of the virtual queue is forgotten
SAMPLES = 300  # lengths that are remembered
MOST_KEPT = 0.5  # of what a request may wait: the rest is for those beyond their share, whatever others bring
BANDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds: what may wait longer than a request of a tenant beyond its share is served after it, and needs no room."""
WELL_WITHIN = 0.7  # of its share: who asks for more than that is no case for protection, as far as demand can be told
BY_FAR = 1.5  # times its share, that a tenant is seen to be beyond it at once
EVEN = 1.1  # times the mean use, up to which tenants had as much: chance makes as much of a difference
LARGEST = 64  # tenants of which demand is followed; all others together are within their shares


class Room(NamedTuple):
    """What a request has to leave free."""

    seconds: float
    kept: float  # of them, for tenants within their shares
    excess: float  # times its share that its tenant asks for beyond it


NO_ROOM = Room(0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Demand:
    """One tenant's demand for engine time, in seconds a second, and what it was charged."""

    weight: float
    since: float  # when it first asked
    at: float  # when these were last true
    long: float = 0.0
    short: float = 0.0
    charged: float = 0.0  # in all, in the unit of account
    used: float = 0.0  # of it a second, over `LONG`

    def rate(self, now: float) -> float:
        """Returns the larger of both averages, as of now, over no longer than it has asked, or `SHORT`."""
        since, whole = now - self.at, 1.0 - exp(-max(now - self.since, SHORT) / LONG)
        return max(self.long * exp(-since / LONG) / whole, self.short * exp(-since / SHORT))

    def is_beyond(self, level: float, now: float) -> bool:
        """Returns whether it is more than the tenant's share, where a tenant of weight 1 has the level: over the long
        average, for everybody asks for more at times, or by far.
        """
        since, share = now - self.at, level * self.weight
        whole = 1.0 - exp(-max(now - self.since, SHORT) / LONG)
        long, short = self.long * exp(-since / LONG) / whole, self.short * exp(-since / SHORT)
        return long >= WELL_WITHIN * share or short >= BY_FAR * share

    def excess(self, level: float, now: float) -> float:
        """Returns how many times its share it is beyond that, over the long average; at least 0."""
        whole = 1.0 - exp(-max(now - self.since, SHORT) / LONG)
        return max(0.0, self.long * exp(-(now - self.at) / LONG) / whole / (level * self.weight) - 1.0)

    def use(self, now: float) -> float:
        """Returns what it is charged a second, by weight, as of now."""
        return self.used * exp(-(now - self.at) / LONG) / self.weight

    def update(self, seconds: float, charged: float, now: float) -> None:
        since = now - self.at
        self.long = self.long * exp(-since / LONG) + seconds / LONG
        self.short = self.short * exp(-since / SHORT) + seconds / SHORT
        self.used = self.used * exp(-since / LONG) + (charged - self.charged) / LONG
        self.charged, self.at = charged, now


class _VirtualQueue:
    """The queue that there would be if only tenants within their shares filled it, in seconds of prefill."""

    def __init__(self) -> None:
        self._length, self._at = 0.0, 0.0
        self._samples: deque[tuple[float, float]] = deque()  # when a request came, and the length with it
        self._lengths: list[float] = []  # of the samples, sorted

    def add(self, prefill: float, slack: float, now: float) -> None:
        length = max(0.0, self._length - (now - self._at)) + prefill
        if length > slack:
            return  # it would be late on a machine that is empty of others' excess
        self._length, self._at = length, now
        self._samples.append((now, length))
        insort(self._lengths, length)
        if len(self._samples) > SAMPLES:
            self._forget_oldest()

    def longest(self, now: float) -> float:
        """Returns the length that `QUANTILE` of those that came lately did not exceed."""
        while self._samples and self._samples[0][0] < now - MEMORY:
            self._forget_oldest()
        count = len(self._lengths)
        return self._lengths[min(count - 1, int(QUANTILE * (count + 1)))] if count else 0.0

    def _forget_oldest(self) -> None:
        _, length = self._samples.popleft()
        del self._lengths[bisect_left(self._lengths, length)]


def _band(slack: float) -> int:
    """Returns the place of the first of `BANDS` that is as long."""
    return min(bisect_left(BANDS, slack), len(BANDS) - 1)


class Reserve:
    """Follows who asks for how much. An arrival costs O(`LARGEST`)."""

    def __init__(self) -> None:
        self._demands: dict[str, _Demand] = {}
        self._rest = _Demand(1.0, 0.0, 0.0)  # of all other tenants
        self._queues = [_VirtualQueue() for _ in BANDS]
        self._level = inf  # engine time a second that a tenant of weight 1 has as its share; inf: there is enough
        self._beyond: dict[str, float] = {}  # tenants beyond their share, and their use by weight

    @property
    def is_needed(self) -> bool:
        """True while all together ask for more than there is."""
        return self._level < inf

    def offered(self, tenant: str, weight: float, seconds: float, charged: float, now: float) -> None:
        """Note a request that is expected to take so many seconds of engine time, let in or not, of a tenant that was
        charged so much until now.
        """
        demand = self._demands.get(tenant)
        if demand is None:
            if len(self._demands) == LARGEST:  # whoever comes is followed for now: a flood begins with one request
                self._give_up_smallest(now)
            demand = self._demands[tenant] = _Demand(weight, now, now, charged=charged)
        demand.weight = weight
        demand.update(seconds, charged, now)
        self._divide(now)

    def is_within(self, tenant: str) -> bool:
        """Returns whether the tenant asks for less than its share, while there is not enough for all."""
        return self._level < inf and tenant not in self._beyond

    def is_beyond(self, tenant: str) -> bool:
        """Returns whether the tenant asks for more than its share, while there is not enough for all."""
        return tenant in self._beyond

    def arrived_within(self, prefill: float, slack: float, now: float) -> None:
        """Note a request of a tenant within its share, with so many seconds of prefill, that may wait `slack`."""
        for queue in self._queues[_band(slack) :]:
            queue.add(prefill, slack, now)

    def room(self, tenant: str, slack: float, now: float) -> Room:
        """Returns what a request has to leave free of the time that it may wait; nothing of tenants within theirs."""
        use = self._beyond.get(tenant)
        if use is None:
            return NO_ROOM
        kept = min(MOST_KEPT * slack, self._queues[_band(slack)].longest(now))
        mean = sum(self._beyond.values()) / len(self._beyond)
        more = min(use / mean - EVEN, 0.5) if use > EVEN * mean else 0.0
        return Room(min(MOST_KEPT * slack, kept + more * slack), kept, self._demands[tenant].excess(self._level, now))

    def _divide(self, now: float) -> None:
        """Find the level by filling up from the least demand for its weight (water-filling)."""
        rates = sorted([(one.rate(now) / one.weight, tenant) for tenant, one in self._demands.items()])
        left = 1.0 - self._rest.rate(now)
        asked, weights = 0.0, 0.0
        for rate, tenant in rates:
            weight = self._demands[tenant].weight
            asked += rate * weight
            weights += weight
        self._level, self._beyond = inf, {}
        if asked <= left or left <= 0.0:
            return
        for rate, tenant in rates:
            if rate * weights >= left:
                self._level = level = left / weights
                self._beyond = {name: one.use(now) for name, one in self._demands.items() if one.is_beyond(level, now)}
                return
            weight = self._demands[tenant].weight
            left -= rate * weight
            weights -= weight

    def _give_up_smallest(self, now: float) -> None:
        smallest = min(self._demands, key=lambda tenant: self._demands[tenant].rate(now))
        demand, rest = self._demands.pop(smallest), self._rest
        since = now - demand.at
        rest.update(0.0, 0.0, now)
        rest.long += demand.long * exp(-since / LONG)
        rest.short += demand.short * exp(-since / SHORT)
