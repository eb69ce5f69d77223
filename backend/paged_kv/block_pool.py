"""A block pool knows which blocks of KV memory are free. It holds numbers only: `kv_cache` has the tensors."""

from typing import Protocol


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool(Protocol):
    """A pool hands out block numbers in [0, num_blocks), all or nothing; the event loop is its only caller."""

    num_blocks: int

    @property
    def num_free(self) -> int: ...

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks, or None when fewer are free."""
        ...

    def release(self, blocks: list[int]) -> None:
        """Give back blocks that `allocate` returned, each once."""
        ...

    def check_integrity(self) -> None:
        """Assert that free and owned blocks are disjoint and make up the pool."""
        ...


class PagedPool:
    """A pool in which any free block will do (PagedAttention, Kwon et al., 2023). The block freed last is reused
    next.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks; the next to be reused is last."""
        return self._free.copy()

    def allocate(self, count: int) -> list[int] | None:
        rest = len(self._free) - count
        if rest < 0:
            return None
        blocks = self._free[rest:]
        blocks.reverse()
        del self._free[rest:]
        for block in blocks:
            self._owned[block] = 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            assert self._owned[block], f"block {block} released twice"
            self._owned[block] = 0
            self._free.append(block)

    def check_integrity(self) -> None:
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert len(self._free) + sum(self._owned) == self.num_blocks, "blocks were lost"
        assert not any(self._owned[block] for block in self._free), "a block is both free and owned"
