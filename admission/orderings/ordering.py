"""The protocol of an ordering: a queue, and an account of its tenants' use."""

from collections import abc
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from admission.aging import Aging
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed, SequenceQueue


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    """Returns the tenant's own weight; else that of "", which stands for all that are not named; else 1."""
    return weights.get(tenant) or weights.get("", 1.0)


class Ordering(SequenceQueue, Protocol):
    """An order that accounts for what everyone uses. Costs are in the unit of account (see `ledger`)."""

    def at(self, now: float) -> None:
        """Note the time, before each plan."""
        ...

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        """Weigh tenants (see `weight_of`) and age classes in this way from now on."""
        ...

    def prepay(self, sequence: Sequence, cost: float) -> None:
        """Charge a sequence that was admitted for the first time with the cost that is predicted for all of it."""
        ...

    def charge(self, sequences: abc.Sequence[Sequence], costs: abc.Sequence[float]) -> Mapping[str, float]:
        """Charge each sequence of a planned step with its predicted cost; returns the sums by tenant."""
        ...

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        """Charge tenants with the further cost that was measured of a step; below 0 it is returned to them."""
        ...

    def settle(self, sequence: Sequence) -> None:
        """Return the rest of what a sequence prepaid to its tenant, once it has ended in any state. Idempotent."""
        ...

    def credit(self, tenant: str) -> float:
        """Returns the tenant's credit, negative when it is in debt."""
        ...


class Line(NamedTuple):
    """Those that wait around a newcomer, in the order in which they are served if nobody else comes."""

    before: list[Sequence]
    behind: list[Sequence]  # those of them whom it must not make late

    @classmethod
    def split(cls, line: list[Sequence], newcomer: Sequence) -> "Line":
        """Returns the parts of a line that the newcomer stands in."""
        place = line.index(newcomer)
        return cls(line[:place], line[place + 1 :])


class ListedOrdering(Ordering, Protocol):
    """An ordering that can list in which order it would serve all that wait."""

    def around(self, newcomer: Sequence) -> Line:
        """Returns those that wait before and behind a sequence that arrives at its `arrival` and does not wait yet,
        by all that is known then. Changes nothing that anybody can see; O(n log n) of those that wait.
        """
        ...


class Indifferent:
    """The part of an ordering that depends neither on who uses what, nor on time."""

    def at(self, now: float) -> None:
        pass

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        pass

    def prepay(self, sequence: Sequence, cost: float) -> None:
        pass

    def charge(self, sequences: abc.Sequence[Sequence], costs: abc.Sequence[float]) -> Mapping[str, float]:
        sums: dict[str, float] = {}
        for sequence, cost in zip(sequences, costs, strict=True):
            sums[sequence.tenant] = sums.get(sequence.tenant, 0.0) + cost
        return sums

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        pass

    def settle(self, sequence: Sequence) -> None:
        pass

    def credit(self, tenant: str) -> float:
        return 0.0


class ArrivalOrder(Indifferent, FirstComeFirstServed):
    """First come, first served, as an ordering."""

    def around(self, newcomer: Sequence) -> Line:
        return Line([*self._restored, *self._arrived.values()], [])


class FairShares(Protocol):
    """Who asks for more than its share of the engine's time, and who for less, while there is not enough for all."""

    def is_beyond(self, tenant: str) -> bool: ...

    def is_within(self, tenant: str) -> bool: ...


class EnoughForAll:
    """Shares while there is enough: nobody is beyond its own, and nobody has to be kept from those who are."""

    def is_beyond(self, tenant: str) -> bool:
        return False

    def is_within(self, tenant: str) -> bool:
        return False
