"""Makes the requests of a simulated run from a trace: number, pace and tenants."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf
from operator import attrgetter
from random import Random
from zlib import crc32

from backend.scheduler.sequence import SPARE_CLASS
from labs.simulation.arrival import Arrival
from labs.simulation.errors import OptionError

Rule = Callable[[Arrival, Random], str]

NO_TIER = "none"
LEAST_SPEEDUP = 1e-9  # times as fast as recorded: below it, times exceed a float's precision
MIN_DECLARED_TOKENS = 1024  # tokens, the least assumed for a request of unknown declaration

_FLOOD = re.compile(r"(?P<tenant>.+):(?P<rate>[\d.]+)@(?P<start>[\d.]+)\+(?P<seconds>[\d.]+)")


def tenant_rule(text: str) -> Rule:
    """Reads a rule of `--tenants`. Raises `OptionError`."""
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
    """Reads a rule of `--classes`. Raises `OptionError`."""
    if text == "trace":
        return lambda arrival, _: arrival.priority_class
    draw = share_rule("--classes", text)
    for name, _ in _shares("--classes", text):
        if not name.isdecimal() or int(name) > SPARE_CLASS:
            reason = f"classes are numbers up to {SPARE_CLASS}, 0 the most urgent, such as 0:0.1,1:0.9"
            raise OptionError("--classes", text, reason)
    return lambda arrival, random: int(draw(arrival, random))


def tier_rule(text: str) -> Callable[[Arrival, Random], str | None]:
    """Reads a rule of `--service-tiers`; `none` stands for requests that name no tier. Raises `OptionError`."""
    if text == "trace":
        return lambda arrival, _: arrival.service_tier
    draw = share_rule("--service-tiers", text)
    return lambda arrival, random: None if (tier := draw(arrival, random)) == NO_TIER else tier


def share_rule(option: str, text: str) -> Rule:
    """A rule that draws names by their shares."""
    shares = _shares(option, text)
    names = [name for name, _ in shares]
    cumulated = list(accumulate(share for _, share in shares))
    return lambda _, random: random.choices(names, cum_weights=cumulated)[0]


@dataclass(frozen=True, slots=True)
class Flood:
    """A flood of `rate` requests a second of one tenant, for `seconds` from `start` on."""

    tenant: str
    rate: float
    start: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Flood":
        """Reads a value of `--flood`. Raises `OptionError`."""
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
        """Returns the arrivals of a Poisson process with lengths drawn from the trace."""
        flooding = []
        time = self.start + random.expovariate(self.rate)
        while time < self.start + self.seconds:
            flooding.append(random.choice(trace).alike._replace(time=time, tenant=self.tenant))
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


_TIME = attrgetter("time")


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of a run. `requests` beyond the trace's length repeat it. Raises `OptionError` if its parts
    contradict each other.

    At a `rate` the arrivals are Poisson, with lengths drawn from the trace, and share nothing; else they are the
    trace's, `speedup` times as fast. The seed decides the arrivals' times (at a rate, and within a time that several
    traced requests share), their tenants and their classes.
    """

    trace: tuple[Arrival, ...]
    requests: int | None = None  # None: as many as the trace has
    speedup: float = 1.0
    rate: float | None = None  # a second
    tenants: str = "trace"
    classes: str = "trace"
    service_tiers: str = "trace"
    floods: tuple[Flood, ...] = ()
    max_tokens: int = 0  # declared at least; 0: `assumed`, if unknown
    patience: float = inf  # seconds
    deadline: float | None = None  # seconds to the first token, for requests without their own
    context: int | None = None  # bound of a prompt and its `assumed` answer, in tokens; None: none

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise OptionError("--requests", self.requests, "must be at least 1")
        for option, value in (("--rate", self.rate), ("--patience", self.patience)):
            if value is not None and not value > 0:
                raise OptionError(option, value, "must be above 0")
        if not LEAST_SPEEDUP <= self.speedup <= 1 / LEAST_SPEEDUP:
            raise OptionError("--speedup", self.speedup, f"must be from {LEAST_SPEEDUP:g} to {1 / LEAST_SPEEDUP:g}")
        tenant_rule(self.tenants), class_rule(self.classes), tier_rule(self.service_tiers)

    @property
    def size(self) -> int:
        return self.requests or len(self.trace)

    @property
    def assumed(self) -> int | None:
        """The assumed declaration in tokens if neither the trace nor `max_tokens` gives one; None: every request has
        one.

        It is a power of two that no answer of the trace exceeds, the same for all: a length that a scheduler could not
        have known is never shown to it.
        """
        return self._power if not self.max_tokens and any(not arrival.max_tokens for arrival in self._used) else None

    @property
    def _used(self) -> tuple[Arrival, ...]:
        return self.trace[: self.size]

    @property
    def _power(self) -> int:
        longest = max(
            max(a.output_tokens, *(turn.output_tokens for turn in a.turns), MIN_DECLARED_TOKENS) for a in self._used
        )
        return 1 << (longest - 1).bit_length()

    def arrivals(self, seed: int) -> list[Arrival]:
        """Returns the arrivals in order of time; the same for the same seed."""
        random = Random(seed)
        timed = self._poisson(random) if self.rate is not None else self._replayed(random)
        assign = self._assignment(random)
        arrivals = [assign(arrival) for arrival in timed]
        for flood in self.floods:
            arrivals += flood.arrivals(arrivals, random)
        arrivals.sort(key=_TIME)
        return arrivals

    def _assignment(self, random: Random) -> Callable[[Arrival], Arrival]:
        """A function that gives a request its tenant, class and tier, by the rules."""
        tenant, tier = tenant_rule(self.tenants), tier_rule(self.service_tiers)
        priority_class, declared = class_rule(self.classes), self._declaration()

        def assigned(arrival: Arrival) -> Arrival:
            changed = arrival._replace(
                tenant=tenant(arrival, random),
                priority_class=priority_class(arrival, random),
                max_tokens=declared(arrival),
                patience=self.patience,
                deadline=self.deadline if arrival.deadline is None else arrival.deadline,
            )
            if self.classes != "trace":
                changed = changed._replace(asked_class=changed.priority_class, service_tier=None)
            if self.service_tiers != "trace":
                changed = changed._replace(service_tier=tier(arrival, random), asked_class=None)
            return changed if self.tenants == "trace" else changed.in_no_scope._replace(key=None, refused_by=None)

        return assigned

    def _declaration(self) -> Callable[[Arrival], int]:
        """A function that gives a request's declared tokens, never its own answer's length unless the context leaves no
        more.
        """
        longest = self._power
        usual = self.max_tokens or longest

        def declared(arrival: Arrival) -> int:
            if arrival.max_tokens:
                return max(self.max_tokens, arrival.max_tokens)
            most = usual if arrival.output_tokens <= usual else longest
            if self.context is None:
                return most
            return max(arrival.output_tokens, min(most, self.context - arrival.prompt_tokens))

        return declared

    def _poisson(self, random: Random) -> Iterator[Arrival]:
        assert self.rate is not None
        time = 0.0
        for _ in range(self.size):
            time += random.expovariate(self.rate)
            yield random.choice(self.trace).alike._replace(time=time)

    def _replayed(self, random: Random) -> Iterator[Arrival]:
        spread = list(_spread(self.trace, random))
        length = spread[-1].time + spread[-1].time / max(1, len(spread) - 1)  # a mean gap between repetitions
        for n in range(self.size):
            repetition, index = divmod(n, len(spread))
            arrival = spread[index].repeated(repetition) if repetition else spread[index]
            yield arrival._replace(time=(repetition * length + arrival.time) / self.speedup)


def _spread(trace: tuple[Arrival, ...], random: Random) -> Iterator[Arrival]:
    """Yields the trace. Requests that share a time were rounded to it: they come at random times before the
    next one.
    """
    groups = [list(group) for _, group in groupby(trace, key=_TIME)]
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        time = group[0].time
        width = following[0].time - time if following is not None else 0.0
        if len(group) == 1:
            yield group[0]
        else:
            offsets = sorted(random.random() * width for _ in group)
            yield from (a._replace(time=time + offset) for a, offset in zip(group, offsets, strict=True))
