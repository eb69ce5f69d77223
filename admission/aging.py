"""Priority classes that age: a lower class waits longer, never forever.

A sequence of class k (0 is the most urgent) that has waited w seconds ranks as `k - w / A`. Since w grows for all at
the same pace, the order is that of the static key `arrival + k * A`, and nothing is ever re-sorted. A sequence is
overtaken only by higher classes that arrive within (k - k') * A seconds after it, so its wait has a bound. Where
classes are not evenly apart, k * A is the offset of the class.

Among classes that are meant to begin as soon, that is the order in which all are due (`Sequence.due`), and by that it
is kept: work with a pressing deadline is due at it, and all other when its class is meant to begin. So inside a tenant
a sequence is overtaken, by work of its own class too, which arrives within the seconds that it has more to wait;
between tenants by no more than the limit on debt (`fair_queue`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from backend.scheduler.sequence import TARGET, Sequence

OVERTAKING = 0.5
"""The work that goes before an old sequence by being shorter, over what goes in order: it makes long waits at most half
as long again. Of recorded lengths at 1.3 times capacity 64 % are in time so, at 1.35 times the p99 of first come, first
served (`labs.benchmarks.size_order`); on other seeds (111, 112) 60 % at 1.36, 62 % at 1.45 with 0.75, 64 % at 1.50
with 1.
"""

SAVED = 3.0
"""The typical requests that may overtake at most because others went in order before."""


@dataclass(frozen=True, slots=True)
class Inflow:
    """At most `burst + rate * t` of work arrives in t seconds, whatever the moment: what a token bucket promises."""

    burst: float  # in the unit of account
    rate: float  # of it, a second


@dataclass(frozen=True, slots=True)
class Aging:
    """`seconds_per_class` is A: what waiting is worth one class; `offsets` are those of the first classes instead."""

    seconds_per_class: float = 2.0
    offsets: tuple[float, ...] = ()  # seconds by class, never falling

    def __post_init__(self) -> None:
        if not self.seconds_per_class >= 0:
            raise ValueError(f"seconds_per_class must be at least 0, got {self.seconds_per_class}")
        if list(self.offsets) != sorted(self.offsets):
            raise ValueError(f"offsets must not fall from class to class, got {self.offsets}")

    def offset(self, priority_class: int) -> float:
        """Returns the seconds by which the class ranks behind the most urgent one."""
        if not self.offsets:
            return priority_class * self.seconds_per_class
        beyond = max(0, priority_class + 1 - len(self.offsets))
        return self.offsets[min(priority_class, len(self.offsets) - 1)] + beyond * self.seconds_per_class

    def due(self, sequence: Sequence) -> float:
        """Returns the key by which sequences are ordered that differ in when they are due (see `Sequence.due`)."""
        return sequence.due + self.offset(sequence.priority_class)

    def overtaking_window(
        self, priority_class: int, by_class: int, due_in: float = TARGET, by_due_in: float = TARGET
    ) -> float:
        """Returns the seconds after its arrival in which newcomers of `by_class` can overtake a sequence. It is due
        `due_in` seconds from its arrival, and they `by_due_in` seconds from theirs.
        """
        return max(0.0, self.offset(priority_class) + due_in - self.offset(by_class) - by_due_in)

    def most_overtaking(
        self,
        priority_class: int,
        inflows: Mapping[int, Inflow],
        pressing: Mapping[int, Inflow] | None = None,
        due_in: float = TARGET,
    ) -> float:
        """Returns the work of one tenant that can overtake a sequence of this class, which is due in so many seconds:
        `inflows` are, by class, those of work that is due no sooner after it came, and `pressing` those of all other.
        """
        higher = [(level, inflow) for level, inflow in inflows.items() if level < priority_class]
        most = sum([flow.burst + flow.rate * self.overtaking_window(priority_class, level) for level, flow in higher])
        for level, flow in (pressing or {}).items():
            window = self.overtaking_window(priority_class, level, due_in, by_due_in=0.0)
            most += flow.burst + flow.rate * window if window > 0 else 0.0
        return most

    def worst_wait(
        self,
        priority_class: int,
        ahead: float,
        inflows: Mapping[int, Inflow],
        share: float,
        rate: float,
        lag: float,
        overtaking_seconds: float = 0.0,
        largest: float = 0.0,
        pressing: Mapping[int, Inflow] | None = None,
        due_in: float = TARGET,
    ) -> float:
        """Returns a bound on the seconds from a sequence's arrival to its first admission, while the device is busy:

            (ahead + sum over higher classes of (burst + inflow * window) + lag) / (share * rate)

        and the same sum over all classes of work that is due sooner after it came (`pressing`, see `most_overtaking`).
        `ahead` is what its tenant's running sequences and those waiting before it can still cost when it arrives,
        `share` its tenant's weight over those of all tenants, `rate` the service of all in units a second (1 in engine
        time), and `lag` the service by which the tenant may be behind its share: its weight times the bound of
        `fair_queue`. For in T seconds the tenant is served at least share * rate * T - lag, and before the sequence is
        admitted it is served nothing but what goes before.

        Where shorter ones may overtake for `overtaking_seconds`, and `largest` is the most that a sequence costs,

            overtaking_seconds + window + (before + overtaken + lag) / (share * rate)

        with the window of the highest class, `before` as above, and `overtaken` OVERTAKING times as much and SAVED
        times `largest`: any may go first until then, and afterwards only what `tenant_queue` says. It is as true as
        the sizes by which that has ordered them.
        """
        before = ahead + self.most_overtaking(priority_class, inflows, pressing, due_in)
        if not overtaking_seconds:
            return (before + lag) / (share * rate)
        sooner = 0.0 if pressing else due_in
        free = overtaking_seconds + self.overtaking_window(priority_class, 0, due_in, sooner)
        return free + ((1 + OVERTAKING) * before + SAVED * largest + lag) / (share * rate)
