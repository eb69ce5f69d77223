"""The requests of one simulated run, made from a trace: how many, how fast, whose."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import attrgetter
from random import Random

from admission.simulation.arrival import Arrival
from admission.simulation.assignment import Flood, class_rule, tenant_rule, tier_rule
from admission.simulation.errors import OptionError

_TIME = attrgetter("time")


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` beyond the trace's length repeat it. Raises `OptionError` when the parts contradict each other.

    At a `rate` the arrivals are Poisson, with lengths drawn from the trace; else they are the trace's, `speedup` times
    as fast. The seed decides the arrivals' times (at a rate, and within a time that several traced requests share),
    their tenants and their classes.
    """

    trace: tuple[Arrival, ...]
    requests: int | None = None  # None: as many as the trace has
    speedup: float = 1.0
    rate: float | None = None  # a second
    tenants: str = "trace"
    classes: str = "trace"
    service_tiers: str = "trace"
    floods: tuple[Flood, ...] = ()
    max_tokens: int = 0  # what every request declares at least; 0: its output length
    patience: float = inf  # seconds

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise OptionError("--requests", self.requests, "must be at least 1")
        for option, value in (("--speedup", self.speedup), ("--rate", self.rate), ("--patience", self.patience)):
            if value is not None and not value > 0:
                raise OptionError(option, value, "must be above 0")
        tenant_rule(self.tenants), class_rule(self.classes), tier_rule(self.service_tiers)

    @property
    def size(self) -> int:
        return self.requests or len(self.trace)

    def arrivals(self, seed: int) -> list[Arrival]:
        """In order of time; the same for the same seed."""
        random = Random(seed)
        timed = self._poisson(random) if self.rate is not None else self._replayed(random)
        assign = self._assignment(random)
        arrivals = [assign(arrival) for arrival in timed]
        for flood in self.floods:
            arrivals += flood.arrivals(arrivals, random)
        arrivals.sort(key=_TIME)
        return arrivals

    def _assignment(self, random: Random) -> Callable[[Arrival], Arrival]:
        """Whose a request is and what it asks for, by the rules."""
        tenant, tier = tenant_rule(self.tenants), tier_rule(self.service_tiers)
        priority_class = class_rule(self.classes)

        def assigned(arrival: Arrival) -> Arrival:
            changed = arrival._replace(
                tenant=tenant(arrival, random),
                priority_class=priority_class(arrival, random),
                max_tokens=max(self.max_tokens, arrival.max_tokens),
                patience=self.patience,
            )
            if self.classes != "trace":
                changed = changed._replace(asked_class=changed.priority_class, service_tier=None)
            if self.service_tiers != "trace":
                changed = changed._replace(service_tier=tier(arrival, random), asked_class=None)
            return changed if self.tenants == "trace" else changed._replace(key=None, refused_by=None)

        return assigned

    def _poisson(self, random: Random) -> Iterator[Arrival]:
        assert self.rate is not None
        time = 0.0
        for _ in range(self.size):
            time += random.expovariate(self.rate)
            yield random.choice(self.trace)._replace(time=time)

    def _replayed(self, random: Random) -> Iterator[Arrival]:
        spread = list(_spread(self.trace, random))
        length = spread[-1].time + spread[-1].time / max(1, len(spread) - 1)  # a mean gap between repetitions
        for n in range(self.size):
            repetition, index = divmod(n, len(spread))
            arrival = spread[index]
            yield arrival._replace(time=(repetition * length + arrival.time) / self.speedup)


def _spread(trace: tuple[Arrival, ...], random: Random) -> Iterator[Arrival]:
    """Requests that share a time were rounded to it: they come at random times before the next one."""
    groups = [list(group) for _, group in groupby(trace, key=_TIME)]
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        time = group[0].time
        width = following[0].time - time if following is not None else 0.0
        if len(group) == 1:
            yield group[0]
        else:
            offsets = sorted(random.random() * width for _ in group)
            yield from (a._replace(time=time + offset) for a, offset in zip(group, offsets, strict=True))
