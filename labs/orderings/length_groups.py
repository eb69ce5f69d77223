"""Prompts of similar lengths together, so that padding to a batch's longest wastes little.

Bucketing by length, as sequence-to-sequence trainers and static servers do it: requests are grouped by the power of two
that their prompts reach, and one plan admits from the group with the oldest request, as long as that group has any. It
pays where prompts are padded (`static_padded`); with packing, as in every other batch here, it is first come, first
served, in a worse order.

Blind to tenants, classes and weights. No request starves: the oldest of all goes first in the next plan.
"""

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import SequenceHeap


def group_of(sequence: Sequence) -> int:
    """The power of two that its prompt reaches."""
    return sequence.num_prompt_tokens.bit_length()


class LengthGroups(Indifferent):
    """Serves one group in a plan, each in the order of arrival. O(groups + log waiting)."""

    def __init__(self) -> None:
        self._groups: dict[int, SequenceHeap] = {}
        self._served: int | None = None  # by this plan

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def set_time(self, now: float) -> None:
        self._served = None

    def add(self, sequence: Sequence) -> None:
        self._groups.setdefault(group_of(sequence), SequenceHeap()).add(sequence, sequence.arrival)

    restore = add

    def head(self) -> Sequence | None:
        if not self._groups:
            return None
        group = self._served if self._served in self._groups else min(self._groups, key=self._oldest)
        return self._groups[group].first()

    def around(self, newcomer: Sequence) -> Line:
        groups = {group: [one for _, one in waiting.in_order()] for group, waiting in self._groups.items()}
        groups.setdefault(group_of(newcomer), []).append(newcomer)
        in_turn = sorted(groups.values(), key=lambda group: group[0].arrival)
        return Line.split([one for group in in_turn for one in group], newcomer)

    def remove(self, sequence: Sequence) -> None:
        group = group_of(sequence)
        if sequence is self.head():
            self._served = group
        self._groups[group].remove(sequence)
        if not self._groups[group]:
            del self._groups[group]

    def _oldest(self, group: int) -> float:
        entry = self._groups[group].first_entry()
        assert entry is not None, "a group has a waiting sequence"
        return entry[0]
