"""The KV pool as tensors, and the bytes of a block."""

import math
import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor


class KVDimensions(Protocol):
    """The properties of a model that decide the size of its KV cache."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def block_bytes(model: KVDimensions, block_size: int, dtype: torch.dtype, num_layers: int | None = None) -> int:
    """Return the bytes of one block: keys and values of `block_size` tokens, of all layers or `num_layers` of them."""
    per_token = 2 * (num_layers or model.num_layers) * model.num_kv_heads * model.head_dim * dtype.itemsize
    return per_token * block_size


class KVCache:
    """The keys and values of every block, laid out [block, layer, K/V, kv_head, offset, head_dim].

    A block is contiguous over its layers, all or those of a group, so that moving one between device and host is a
    single copy. Several models may read one memory: each sees a block's first bytes as keys and values of its own
    shape.
    """

    def __init__(
        self,
        model: KVDimensions,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_block_bytes: int = 0,
        memory: Tensor | None = None,
        num_layers: int | None = None,
    ) -> None:
        """`num_block_bytes`: at least of each block, for a larger model's keys and values. `memory`: another cache's,
        to be shared. `num_layers`: of a block; None: all.
        """
        layers = num_layers or model.num_layers
        shape = (num_blocks, layers, 2, model.num_kv_heads, block_size, model.head_dim)
        own = block_bytes(model, block_size, dtype, layers)
        # [num_blocks, bytes] uint8
        self.memory = _zeros((num_blocks, max(own, num_block_bytes)), device) if memory is None else memory
        self.blocks = self.memory[:, :own].view(dtype).view(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make the second block of each pair like the first, on the current stream, without allocating memory."""
        for block, other in pairs:
            self.blocks[other].copy_(self.blocks[block])


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Allocate bytes of zeros. On a CPU pages are allocated when first written, huge ones if the kernel has them: an
    unused pool costs no memory. Shared memory, which `mmap` makes unless told otherwise, has none as a rule.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
