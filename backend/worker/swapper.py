"""The swapper copies blocks of KV memory between the device and the host before a step computes.

Copies are queued in the order of their steps and run as early as the device likes: beside the steps before theirs, if
it has a stream for them. No event orders them behind those steps, and none is needed (`Batch.swap_out`).
"""

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from backend.errors import ConfigError
from backend.paged_kv.kv_cache import KVCache
from backend.roofline import show_bytes
from backend.scheduler.batch import Batch
from backend.worker.device_stream import on_device

MEASURED_BLOCKS = 16  # blocks copied to the host and back, to measure the time of a copy
STAGING_BYTES = 2**23  # of a GPU's memory: 0.2 ms of its link, many times the cost of launching a kernel and a copy

_HostRun = tuple[int, list[int]]
"""The first of neighbouring blocks on the host, and the device's blocks that belong to them."""


class Swapper:
    """Keeps the host's blocks.

    A GPU gathers its blocks in staging memory by one kernel, and a run of neighbouring blocks on the host is one copy
    from there: two launches for a whole staging memory, where each single block would take one, 10 µs of the host. The
    host pool reuses blocks in the order in which it took them, so that most are neighbours. A CPU copies block by
    block, which takes 4 µs for 32 KiB; gathering takes 1 µs on idle cores, and 100 when other processes use them.
    """

    def __init__(self, kv: KVCache, num_host_blocks: int, gathers: bool | None = None) -> None:
        """`gathers`: blocks go through staging memory; None: whichever is faster on the device."""
        self._blocks = _rows(kv.memory)
        on_gpu = kv.blocks.device.type == "cuda"
        shape = (num_host_blocks, self._blocks.shape[1])
        self._host = torch.empty(shape, dtype=self._blocks.dtype)
        if on_gpu:
            _pin(self._host, kv.blocks.device)
            weakref.finalize(self, _unpin, self._host, kv.blocks.device).atexit = False
        self._staging: Tensor | None = None
        row_bytes = self._blocks.shape[1] * self._blocks.element_size()
        if on_gpu if gathers is None else gathers:
            self._staging = self._blocks.new_empty((max(1, STAGING_BYTES // row_bytes), self._blocks.shape[1]))

    @torch.inference_mode()
    def copy(self, batch: Batch) -> None:
        """Queue the copies of a step on the current stream: first all to the host, then those back. Of several copies
        to one block the last counts.
        """
        outs = [(host_block, block) for block, host_block in batch.swap_out]
        ins = [(host_block, block) for block, host_block in {block: host for host, block in batch.swap_in}.items()]
        if self._staging is None:
            for host_block, block in outs:
                self._host[host_block].copy_(self._blocks[block])
            for host_block, block in ins:
                self._blocks[block].copy_(self._host[host_block])
            return
        for staged, index, host in self._staged(self._staging, outs):
            torch.index_select(self._blocks, 0, index, out=staged)
            host.copy_(staged, non_blocking=True)
        for staged, index, host in self._staged(self._staging, ins):
            staged.copy_(host, non_blocking=True)
            self._blocks.index_copy_(0, index, staged)

    def _staged(self, staging: Tensor, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each run of host blocks its staging memory, the device's blocks and the host's."""
        runs = list(_runs(pairs, len(staging)))
        index = on_device([block for _, blocks in runs for block in blocks], torch.int64, staging.device)
        begin = 0
        for first, blocks in runs:
            count = len(blocks)
            yield staging[:count], index[begin : begin + count], self._host[first : first + count]
            begin += count

    def measure(self) -> float:
        """Return the seconds of a copy of one block, in the quickest of three attempts. The copied blocks hold nothing
        of use yet.
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


def _pin(memory: Tensor, device: torch.device) -> None:
    """Pin host memory, so that the device can copy to and from it by itself. Torch's own allocator rounds up to a power
    of two, and could take twice as much. Raises `ConfigError`.
    """
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError as error:
        with suppress(RuntimeError):
            torch.zeros(1, device=device)  # CUDA reports the error again, and would report it to its next caller
        asked = show_bytes(memory.nbytes)
        raise ConfigError(
            f"swap_space_bytes asks for {asked}, and no GPU can reach as much of the host: {error}"
        ) from None


def _unpin(memory: Tensor, device: torch.device) -> None:
    with suppress(RuntimeError):  # of a device that has failed
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _rows(rows: Tensor) -> Tensor:
    """Return blocks [num_blocks, bytes] as [num_blocks, words], of the widest words that make up a block: kernels copy
    by the word.
    """
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


def _runs(pairs: Iterable[tuple[int, int]], most: int) -> Iterator[_HostRun]:
    """Yield runs of at most `most` neighbours on the host, from pairs of a host block and a device block."""
    first, blocks = 0, list[int]()
    for host_block, block in sorted(pairs):
        if blocks and (host_block != first + len(blocks) or len(blocks) == most):
            yield first, blocks
            blocks = []
        if not blocks:
            first = host_block
        blocks.append(block)
    if blocks:
        yield first, blocks
