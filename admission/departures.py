"""Departures: the predicted ends of running sequences, for which a newcomer waits if slots or memory are lacking."""

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import accumulate, count
from math import ceil

from admission.output_length import OutputLengths
from backend.scheduler.sequence import Sequence

MAX_QUANTILES_PER_SEQUENCE = 8  # of one sequence's output length
MAX_QUANTILES = 128  # of all sequences together: with many running, each has fewer
# a sequence that outlived its forecast is expected to generate at least this part of its output more
OUTLIVED_OUTPUT_DIVISOR = 8
_GOLDEN_RATIO = 0.6180339887498949  # multiples of it, less their whole parts, are spread evenly


class Departures:
    """Predicts the ends of running sequences, in O(running) a call."""

    def __init__(self, lengths: OutputLengths, most_running: int, token_budget: int) -> None:
        self._lengths, self._token_budget = lengths, token_budget
        self._each = max(1, min(MAX_QUANTILES_PER_SEQUENCE, MAX_QUANTILES // most_running))
        self._ends: list[int] = []  # sorted step numbers, `_each` of each sequence
        self._of: dict[Sequence, tuple[int, list[int]]] = {}  # a number, and its ends
        self._numbers = count()
        self._sums = [0]  # of the first n ends
        self._step = 0

    def follow(self, running: Mapping[str, Sequence], step: int) -> None:
        """Update to the running sequences, and the number of the newest step."""
        if step == self._step and len(running) == len(self._of):
            return
        self._step = step
        joined = [sequence for sequence in running.values() if sequence not in self._of]
        if len(self._of) + len(joined) != len(running):
            for sequence in [one for one in self._of if one.id not in running]:
                self._drop(sequence)
        for sequence in joined:
            self._expect(sequence)
        outlived = [(ends[0], number, one) for one, (number, ends) in self._of.items() if ends[0] <= step]
        for _, _, sequence in sorted(outlived):  # beyond its first quantile: it is forecast anew
            self._drop(sequence)
            self._expect(sequence)
        self._sums = list(accumulate(self._ends, initial=0))

    def steps_until(self, lacking: float, work: float, free: int, length: float) -> int:
        """Return the steps until a newcomer has a slot: `lacking` sequences have to end before the newcomer and those
        ahead of it, whose answers take `work` steps together, have one each. `free` slots can be taken now; `length` is
        the typical answer's length. Monotone: neither more `lacking` nor more `work` ever makes it sooner.
        """
        ends, now, each = self._ends, self._step, self._each
        first, last = int(each / 2), max(0, int((lacking - 0.5) * each))
        slots = len(ends) / each + free
        share = ceil(self._until_served(each * (work - min(work, slots * length) / 2), each * free))
        if not free:
            share = max(share, ends[first] - now)
        return max(0, share if last >= len(ends) else min(share, ends[last] - now))

    def _until_served(self, work: float, free: int) -> float:
        """Return the steps until `free` slots, and the slots that become free, have served `work` steps to waiting
        requests.
        """
        ends, sums, now = self._ends, self._sums, self._step
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if (middle + free) * ends[middle] - sums[middle] - free * now < work:
                low = middle + 1
            else:
                high = middle
        return (work + sums[low] + free * now) / (low + free) - now if low + free else 0.0

    def _expect(self, sequence: Sequence) -> None:
        number, generated, each = next(self._numbers), len(sequence.output), self._each
        offset = number * _GOLDEN_RATIO % 1.0
        shares = [(n + offset) / each for n in range(each)]
        most = sequence.request.max_tokens
        longer = min(generated + 1 + generated // OUTLIVED_OUTPUT_DIVISOR, max(most, generated + 1))
        lengths = self._lengths.quantiles(sequence.tenant, most, shares, generated, longer)
        begun = self._step - generated + max(0, sequence.num_uncomputed_tokens - 1) // self._token_budget
        expected = [begun + length for length in lengths]
        self._of[sequence] = number, expected
        for end in expected:
            insort(self._ends, end)

    def _drop(self, sequence: Sequence) -> None:
        for end in self._of.pop(sequence)[1]:
            del self._ends[bisect_left(self._ends, end)]
