"""Blocks of the prefix cache in an event log, which has no token in it and no hash: a block is an opaque ordinal.

An ordinal stands for the contents of one block and all before it. New contents have consecutive ordinals, so a log says
runs of them: `[[7, 3], [20, 1]]` are the blocks 7, 8, 9 and 20.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from json.encoder import encode_basestring_ascii
from weakref import WeakValueDictionary

from backend.paged_kv.block_names import BlockName
from backend.scheduler.block_tables import BlockTables
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

Runs = list[list[int]]  # [first ordinal, how many] each


def runs_of(ordinals: Iterable[int]) -> str:
    """Returns these ordinals, all above 0 and in their order, as runs in JSON."""
    runs: list[str] = []
    first = after = 0
    for ordinal in ordinals:
        if ordinal != after:
            if first:
                runs.append(f"[{first},{after - first}]")
            first = ordinal
        after = ordinal + 1
    if first:
        runs.append(f"[{first},{after - first}]")
    return f"[{','.join(runs)}]"


def ordinals_of(runs: Runs) -> list[int]:
    """Returns the ordinals of runs. Raises `ValueError` or `TypeError` where they are none."""
    return list(chain.from_iterable(range(first, first + count) for first, count in runs))


def _member(name: str, values: Mapping[str, str]) -> str:
    """Returns a member of a JSON object: another one, of values that are written already."""
    said = ",".join([f"{encode_basestring_ascii(key)}:{value}" for key, value in values.items()])
    return f'"{name}":{{{said}}}'


class NewlyNamed:
    """Collects the blocks that were named since the last line of a log: those of output, as sequences left them."""

    def __init__(self, blocks: BlockTables) -> None:
        self._blocks = blocks
        self._first: dict[Sequence, int] = {}  # which of a sequence's names is the first new one

    def collect(self) -> None:
        """Note what the event that has just happened named: the next may follow before a line is written."""
        for sequence, first in self._blocks.newly_named:
            self._first.setdefault(sequence, first)

    def take(self) -> list[str]:
        """Returns all that is new, by the ids of the sequences, as a member of a JSON object; none where there is
        nothing.
        """
        if self._blocks.newly_named:
            self.collect()
        if not self._first:
            return []
        named, self._first = self._first, {}
        blocks = {
            sequence.id: runs_of([name.ordinal for name in sequence.block_names[first:]])
            for sequence, first in named.items()
        }
        return [_member("blocks", blocks)]


class CacheFindings:
    """Says what plans found in the cache, and what they gave up of it."""

    def __init__(self, blocks: BlockTables) -> None:
        self._cache = blocks.cache
        self._evictions = 0

    def take(self, step: ScheduledStep | None) -> list[str]:
        """Returns the blocks that sequences found, by their ids; from whose prompts others were forked; how many blocks
        were given up since the last plan that said so, and how many nobody holds now: as members of a JSON object,
        without those of which there is nothing.
        """
        said: list[str] = []
        if step is not None and step.hits:
            found: dict[str, int] = {}
            for sequence, _, blocks in step.hits:
                found[sequence.id] = found.get(sequence.id, 0) + len(blocks)
            said.append(_member("found", {name: str(count) for name, count in found.items()}))
        if step is not None and step.forks:
            leaders = {sequence.id: encode_basestring_ascii(leader.id) for sequence, leader, _ in step.forks}
            said.append(_member("forked", leaders))
        if self._cache.evictions != self._evictions:
            said.append(f'"evicted":{self._cache.evictions - self._evictions},"idle":{self._cache.num_idle}')
            self._evictions = self._cache.evictions
        return said


class ReplayedNames:
    """Gives out names by the ordinals of a log: of one ordinal the same name, for as long as anybody uses it."""

    def __init__(self) -> None:
        self._names: WeakValueDictionary[int, BlockName] = WeakValueDictionary()
        self._told: dict[str, list[int]] = {}

    def of(self, runs: Runs) -> list[BlockName]:
        return [self._name(ordinal) for ordinal in ordinals_of(runs)]

    def tell(self, blocks: Mapping[str, Runs]) -> None:
        """Say which new names the next event gives out, by the ids of the sequences."""
        self._told = {name: ordinals_of(runs) for name, runs in blocks.items()}

    def name(self, sequence: Sequence, num_blocks: int) -> None:
        """Name a sequence's blocks as the log does with the present event, and none that it does not tell yet: where it
        was recorded, blocks were named as they filled, on which no decision depends.
        """
        if sequence.id in self._told:
            sequence.block_names += [self._name(ordinal) for ordinal in self._told.pop(sequence.id)]

    def _name(self, ordinal: int) -> BlockName:
        name = self._names.get(ordinal)
        if name is None:
            name = self._names[ordinal] = BlockName(ordinal)
        return name
