"""What matching takes of processors, by the rows that it was for, until their owners are charged for it."""

from threading import Lock

import numpy as np
import numpy.typing as npt


class MaskTime:
    """Reads what grammar processes count for each slot. A slot is admitted by one thread; any may ask for the rest."""

    def __init__(self) -> None:
        self.nanoseconds: npt.NDArray[np.int64] | None = None  # by slot, since the start; None: there are none yet
        self._owners: dict[int, str] = {}  # by slot
        self._taken: dict[int, int] = {}  # by slot, of what is counted
        self._before: dict[str, int] = {}  # by owner, of sequences that had a slot before, and was not taken
        self._lock = Lock()

    @property
    def seconds(self) -> float:
        """All that matching has taken so far."""
        return 0.0 if self.nanoseconds is None else int(self.nanoseconds.sum()) / 1e9

    def admit(self, slot: int, owner: str) -> None:
        """Have the slot's time be this owner's from now on."""
        with self._lock:
            if (before := self._owners.get(slot)) is not None and (left := self._take(slot)):
                self._before[before] = self._before.get(before, 0) + left
            self._owners[slot] = owner

    def take(self, owner: str) -> float:
        """Return the seconds that an owner's rows have taken since this was last asked."""
        with self._lock:
            slots = [slot for slot, name in self._owners.items() if name == owner]
            return (self._before.pop(owner, 0) + sum(map(self._take, slots))) / 1e9

    def _take(self, slot: int) -> int:
        if self.nanoseconds is None:
            return 0
        counted, taken = int(self.nanoseconds[slot]), self._taken.get(slot, 0)
        self._taken[slot] = counted
        return counted - taken
