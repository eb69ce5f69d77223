"""What the core asks of an ordering: a queue, and an account of what its tenants use."""

from collections import abc
from collections.abc import Iterable, Mapping
from typing import Protocol

from admission.aging import Aging
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed, SequenceQueue


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    """Its own; else that of "", which stands for all that are not named; else 1."""
    return weights.get(tenant) or weights.get("", 1.0)


class Ordering(SequenceQueue, Protocol):
    """An order that is told what everyone uses. Costs are in the unit of account (see `ledger`)."""

    def at(self, now: float) -> None:
        """The time, before each plan."""
        ...

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        """From now on tenants weigh this much (see `weight_of`), and classes age so."""
        ...

    def prepay(self, sequence: Sequence, cost: float) -> None:
        """It was admitted for the first time and is predicted to cost this much in all."""
        ...

    def charge(self, sequences: abc.Sequence[Sequence], costs: abc.Sequence[float]) -> Mapping[str, float]:
        """A planned step costs each sequence this much, by prediction; returns the sums by tenant."""
        ...

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        """By measurement a step cost tenants this much more, or less, than was charged."""
        ...

    def settle(self, sequence: Sequence) -> None:
        """It has ended, in whatever state; what it prepaid and did not use is its tenant's again. Idempotent."""
        ...

    def credit(self, tenant: str) -> float:
        """The tenant's credit, negative when it is in debt."""
        ...


class Indifferent:
    """The part of an ordering that does not care who uses what, nor when."""

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
