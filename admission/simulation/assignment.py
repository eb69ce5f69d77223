"""Whose a traced request is, and of which class: traces do not say, so rules do.

    4                       tenants tenant-1 to tenant-4, each request to one of them at random
    heavy:0.8,light:0.2     tenants by their share of the requests
    hash:4                  tenant-1 to tenant-4 by the request's session, the same for every seed
    trace                   as the trace says, which our own logs do; else all are one tenant's

Classes take the second form, `0:0.1,1:0.9`, or the last; so do service tiers, `flex:0.5,none:0.5`. A flood,
`noisy:20@60+30`, adds one tenant's 20 requests a second for 30 seconds from second 60 on, with lengths drawn from the
trace.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from zlib import crc32

from admission.simulation.arrival import Arrival
from admission.simulation.errors import OptionError

Rule = Callable[[Arrival, Random], str]

NO_TIER = "none"

_FLOOD = re.compile(r"(?P<tenant>.+):(?P<rate>[\d.]+)@(?P<start>[\d.]+)\+(?P<seconds>[\d.]+)")


def tenant_rule(text: str) -> Rule:
    """Raises `OptionError`."""
    if text == "trace":
        return lambda arrival, _: arrival.tenant or "everyone"
    if text.isdecimal():
        names = _numbered("--tenants", text)
        return lambda _, random: random.choice(names)
    kind, _, count = text.partition(":")
    if kind == "hash" and count.isdecimal():
        names = _numbered("--tenants", count)
        return lambda arrival, _: names[crc32(str(arrival.session).encode()) % len(names)]
    return share_rule("--tenants", text)


def class_rule(text: str) -> Callable[[Arrival, Random], int]:
    """Raises `OptionError`."""
    if text == "trace":
        return lambda arrival, _: arrival.priority_class
    draw = share_rule("--classes", text)
    for name, _ in _shares("--classes", text):
        if not name.isdecimal():
            raise OptionError("--classes", text, "classes are numbers, 0 the most urgent, such as 0:0.1,1:0.9")
    return lambda arrival, random: int(draw(arrival, random))


def tier_rule(text: str) -> Callable[[Arrival, Random], str | None]:
    """`none` stands for requests that name no tier. Raises `OptionError`."""
    if text == "trace":
        return lambda arrival, _: arrival.service_tier
    draw = share_rule("--service-tiers", text)
    return lambda arrival, random: None if (tier := draw(arrival, random)) == NO_TIER else tier


def share_rule(option: str, text: str) -> Rule:
    """One of the names, each as often as its share says."""
    shares = _shares(option, text)
    names = [name for name, _ in shares]
    cumulated = list(accumulate(share for _, share in shares))
    return lambda _, random: random.choices(names, cum_weights=cumulated)[0]


@dataclass(frozen=True, slots=True)
class Flood:
    """`rate` requests a second of one tenant, for `seconds` from `start` on."""

    tenant: str
    rate: float
    start: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Flood":
        """Raises `OptionError`."""
        match = _FLOOD.fullmatch(text)
        try:
            assert match is not None
            flood = cls(match["tenant"], float(match["rate"]), float(match["start"]), float(match["seconds"]))
        except (AssertionError, ValueError):
            raise OptionError("--flood", text, "write TENANT:RATE@START+SECONDS, such as noisy:20@60+30") from None
        if not (flood.rate > 0 and flood.seconds > 0):
            raise OptionError("--flood", text, "the rate and the seconds must be above 0")
        return flood

    def arrivals(self, trace: list[Arrival], random: Random) -> list[Arrival]:
        """A Poisson process with lengths drawn from the trace."""
        flooding = []
        time = self.start + random.expovariate(self.rate)
        while time < self.start + self.seconds:
            flooding.append(random.choice(trace)._replace(time=time, tenant=self.tenant))
            time += random.expovariate(self.rate)
        return flooding


def _numbered(option: str, count: str) -> list[str]:
    if not 1 <= int(count) <= 100_000:
        raise OptionError(option, count, "the number of tenants must be between 1 and 100000")
    return [f"tenant-{n}" for n in range(1, int(count) + 1)]


def _shares(option: str, text: str) -> list[tuple[str, float]]:
    shares = []
    for part in text.split(","):
        name, _, share = part.rpartition(":")
        try:
            shares.append((name, float(share)))
        except ValueError:
            name = ""
        if not name or not 0 < shares[-1][1] < float("inf"):
            raise OptionError(option, text, "write NAME:SHARE, with shares above 0, such as heavy:0.8,light:0.2")
    if len({name for name, _ in shares}) < len(shares):
        raise OptionError(option, text, "a name may appear once")
    return shares
