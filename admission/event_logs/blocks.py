"""Blocks of the prefix cache in an event log, which holds no token and no hash: a block is an opaque ordinal.

An ordinal stands for the contents of one block and all before it. New contents have consecutive ordinals, so a log
names runs of them: `[[7, 3], [20, 1]]` are the blocks 7, 8, 9 and 20.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from json.encoder import encode_basestring_ascii
from weakref import WeakValueDictionary

from backend.paged_kv.block_names import BlockName
from backend.scheduler.block_tables import BlockTables
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

Runs = list[list[int]]  # [first ordinal, count] each


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
    """Return the ordinals of runs. Raises `ValueError` or `TypeError` for malformed runs."""
    return list(chain.from_iterable(range(first, first + count) for first, count in runs))


def _member(name: str, values: Mapping[str, str]) -> str:
    """Return a member of a JSON object whose values are encoded already."""
    said = ",".join([f"{encode_basestring_ascii(key)}:{value}" for key, value in values.items()])
    return f'"{name}":{{{said}}}'


class NewlyNamed:
    """Collects the output blocks named since the last line of a log, as sequences left them."""

    def __init__(self, blocks: BlockTables) -> None:
        self._blocks = blocks
        self._first: dict[Sequence, int] = {}  # the index of a sequence's first new name

    def collect(self) -> None:
        """Collect the names of the last event: the next event may follow before a line is written."""
        for sequence, first in self._blocks.newly_named:
            self._first.setdefault(sequence, first)

    def take_members(self) -> list[str]:
        """Return all new names, by sequence id, as a member of a JSON object; empty if there are none."""
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
    """Reports the cache hits and evictions of plans."""

    def __init__(self, blocks: BlockTables) -> None:
        self._cache = blocks.cache
        self._evictions = 0

    def take_members(self, step: ScheduledStep | None) -> list[str]:
        """Return, as members of a JSON object and without empty ones: the hit blocks by sequence id, the forked
        sequences with their leaders, the evictions since the last plan that reported any, and the idle blocks now.
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
    """Gives out names by the ordinals of a log: one ordinal keeps its name as long as a block uses it."""

    def __init__(self) -> None:
        self._names: WeakValueDictionary[int, BlockName] = WeakValueDictionary()
        self._told: dict[str, list[int]] = {}

    def of(self, runs: Runs) -> list[BlockName]:
        return [self._name(ordinal) for ordinal in ordinals_of(runs)]

    def tell(self, blocks: Mapping[str, Runs]) -> None:
        """Set the new names that the next event gives out, by sequence id."""
        self._told = {name: ordinals_of(runs) for name, runs in blocks.items()}

    def name(self, sequence: Sequence, num_blocks: int) -> None:
        """Name a sequence's blocks as the log does with the present event, and no others: in the recorded run, blocks
        were named as they filled, on which no decision depends.
        """
        if sequence.id in self._told:
            sequence.block_names += [self._name(ordinal) for ordinal in self._told.pop(sequence.id)]

    def _name(self, ordinal: int) -> BlockName:
        name = self._names.get(ordinal)
        if name is None:
            name = self._names[ordinal] = BlockName(ordinal)
        return name
