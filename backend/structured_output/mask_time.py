"""The processor time of matching, by row, until the rows' owners are charged for it."""

from threading import Lock

import numpy as np
import numpy.typing as npt


class MaskTime:
    """Reads the processor time that grammar processes count for each slot. One thread admits slots; any may read the
    time.
    """

    def __init__(self) -> None:
        self.nanoseconds: npt.NDArray[np.int64] | None = None  # by slot, since the start; None before the first slot
        self._owners: dict[int, str] = {}  # by slot
        self._taken: dict[int, int] = {}  # by slot, nanoseconds that were charged
        self._before: dict[str, int] = {}  # by owner, uncharged nanoseconds of sequences that have left their slots
        self._lock = Lock()

    @property
    def seconds(self) -> float:
        """The processor seconds of all matching so far."""
        return 0.0 if self.nanoseconds is None else int(self.nanoseconds.sum()) / 1e9

    def fill_slot(self, slot: int, owner: str) -> None:
        """Count the slot's further time for this owner."""
        with self._lock:
            if (before := self._owners.get(slot)) is not None and (left := self._take(slot)):
                self._before[before] = self._before.get(before, 0) + left
            self._owners[slot] = owner

    def take_seconds(self, owner: str) -> float:
        """Return the processor seconds of the owner's rows since the last call."""
        with self._lock:
            slots = [slot for slot, name in self._owners.items() if name == owner]
            return (self._before.pop(owner, 0) + sum(map(self._take, slots))) / 1e9

    def _take(self, slot: int) -> int:
        if self.nanoseconds is None:
            return 0
        counted, taken = int(self.nanoseconds[slot]), self._taken.get(slot, 0)
        self._taken[slot] = counted
        return counted - taken
