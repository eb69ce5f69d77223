"""Orderings whose keys change with time at different rates, so that finding the head is O(waiting)."""

from backend.scheduler.sequence import Sequence


class Rescored:
    """The smallest key goes first. `rates` are the sequences' scores, fixed at arrival."""

    def __init__(self) -> None:
        self.rates: dict[Sequence, float] = {}  # of live sequences
        self.waiting: dict[Sequence, None] = {}
        self.now = 0.0
        self._head: Sequence | None = None  # present head; None: unknown

    def rate(self, sequence: Sequence) -> float:
        """A new sequence's score."""
        raise NotImplementedError

    def key(self, sequence: Sequence, now: float) -> tuple[float, float]:
        """Return the rank of a sequence at a time; the second number breaks ties."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.waiting)

    def set_time(self, now: float) -> None:
        self.now, self._head = now, None

    def add(self, sequence: Sequence) -> None:
        self.rates[sequence] = self.rate(sequence)
        self.restore(sequence)
        self.set_time(max(self.now, sequence.arrival))

    def restore(self, sequence: Sequence) -> None:
        self.waiting[sequence] = None
        self._head = None

    def head(self) -> Sequence | None:
        if self._head is None and self.waiting:
            self._head = min(self.waiting, key=lambda sequence: self.key(sequence, self.now))
        return self._head

    def remove(self, sequence: Sequence) -> None:
        del self.waiting[sequence]
        self._head = None

    def ended(self, sequence: Sequence) -> None:
        self.rates.pop(sequence, None)
