"""The ranks of a tensor-parallel model exchange tensors, by NCCL on GPUs and by gloo on CPUs."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backend.kernels.ops import Linear
from backend.parallel.shard import Shard

EXCHANGE_TIMEOUT_SECONDS = (
    600.0  # that a rank waits for others, which may be warming up; a rank that ends is noticed at once
)


class RankGroup:
    """A process group of all ranks, which make the same calls in the same order. A call returns when this rank's part
    is done, or queued on its device's stream. Raises `RuntimeError` if another rank is gone.

    It is an object rather than torch's default group, so that ranks can be threads as well.
    """

    def __init__(self, rank: int, size: int, meeting_place: Path, device: torch.device) -> None:
        """Wait for the other ranks. `meeting_place` is the path of a file that does not exist yet, which all ranks can
        reach.
        """
        self.rank, self.size = rank, size
        store = dist.FileStore(str(meeting_place), size)  # type: ignore[attr-defined] # as documented
        timeout = timedelta(seconds=EXCHANGE_TIMEOUT_SECONDS)
        self._backend: Any
        self._sums = device.type == "cuda"  # the backend sums by itself
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, size, timeout)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`, which may be overwritten.

        On CPUs the addends come in the order of the ranks, so that a row's sum is the same to the last bit in any
        batch: the order of gloo's own sum depends on the number of rows, and for a decode it takes four times as long.
        """
        if self._sums:
            self._backend.allreduce([x]).wait()
            return x
        first, *others = self._gathered(x)
        for other in others:
            first += other
        return first

    def least(self, number: int, device: torch.device) -> int:
        """Return the least of the ranks' numbers."""
        return int(torch.cat(self._gathered(torch.tensor([number], device=device))).min())

    def gather(self, x: Tensor) -> Tensor:
        """Return the ranks' `x` [rows, columns], all of one shape, side by side: [rows, size * columns]."""
        return torch.cat(self._gathered(x.contiguous()), dim=-1)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._backend.allgather([parts], [x]).wait()
        return parts

    def share(self, x: Tensor) -> Tensor:
        """Replace `x` by rank 0's, and return it."""
        self._backend.broadcast([x], dist.BroadcastOptions()).wait()
        return x


@dataclass(frozen=True, slots=True)
class Parallel:
    """A rank's part of the model, and its group of ranks."""

    shard: Shard
    group: RankGroup

    def summed(self, product: Linear) -> Linear:
        """Return the product of a layer whose inputs the ranks divide: the sum of the ranks' products."""
        return lambda x: self.group.sum(product(x))

    def embed(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return the embeddings [tokens, hidden] of tokens [tokens], of which this rank holds `rows`."""
        vocab = self.shard.vocab
        is_other = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        embedded = torch.nn.functional.embedding((token_ids - vocab.start).masked_fill(is_other, 0), rows)
        return self.group.sum(embedded.masked_fill_(is_other.unsqueeze(1), 0))
