"""The swapper copies blocks of KV memory between the device and the host, as a step says, before it computes."""

import time

import torch

from backend.paged_kv.kv_cache import KVCache
from backend.scheduler.batch import Batch

MEASURED_BLOCKS = 16  # copied to the host and back, to measure what a copy takes


class Swapper:
    """Keeps the host's blocks. Copies are queued on the current stream, hence in the order of the steps."""

    def __init__(self, kv: KVCache, num_host_blocks: int) -> None:
        self._blocks = kv.blocks
        shape = (num_host_blocks, *kv.blocks.shape[1:])
        self._host = torch.empty(shape, dtype=kv.dtype, pin_memory=kv.blocks.device.type == "cuda")

    def copy(self, batch: Batch) -> None:
        """Make the copies of a step: first all to the host, then those back."""
        for block, host_block in batch.swap_out:
            self._host[host_block].copy_(self._blocks[block], non_blocking=True)
        for host_block, block in batch.swap_in:
            self._blocks[block].copy_(self._host[host_block], non_blocking=True)

    def measure(self) -> float:
        """Return the seconds that a copy of one block takes, of the quickest of three attempts. The blocks that are
        copied hold nothing of use yet.
        """
        count = min(MEASURED_BLOCKS, len(self._host), len(self._blocks))
        pairs = [(index, index) for index in range(count)]
        return min(self._measure(Batch(0, swap_out=pairs, swap_in=pairs)) for _ in range(3)) / (2 * count)

    def _measure(self, batch: Batch) -> float:
        begin = time.perf_counter()
        self.copy(batch)
        if self._blocks.device.type == "cuda":
            torch.cuda.synchronize(self._blocks.device)
        return time.perf_counter() - begin
