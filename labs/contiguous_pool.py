"""KV memory as before paging, added to `backend.scheduler.block_tables.POOLS` once this is imported."""

from bisect import insort

from backend.config import KVAllocation
from backend.scheduler.block_tables import POOLS


class ContiguousPool:
    """A pool of one run of neighbouring blocks per sequence, first fit: as before paging, fragmentation included."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._runs = [(0, num_blocks)]  # free (start, length), sorted, never adjacent

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._runs)

    def allocate(self, count: int) -> list[int] | None:
        if count == 0:
            return []
        for index, (start, length) in enumerate(self._runs):
            if length >= count:
                rest = [(start + count, length - count)] if length > count else []
                self._runs[index : index + 1] = rest
                return list(range(start, start + count))
        return None

    def release(self, blocks: list[int]) -> None:
        if not blocks:
            return
        insort(self._runs, (blocks[0], len(blocks)))
        merged: list[tuple[int, int]] = []
        for start, length in self._runs:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._runs = merged

    def check_integrity(self) -> None:
        ends = [0]
        for start, length in self._runs:
            assert length > 0, "an empty run"
            assert start >= ends[-1], "free runs overlap"
            ends.append(start + length)
        assert ends[-1] <= self.num_blocks, "a run leaves the pool"


POOLS[KVAllocation.CONTIGUOUS] = ContiguousPool
