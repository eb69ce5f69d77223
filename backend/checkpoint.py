"""The tensors of a model directory's safetensors, one at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from backend.shards import Shards, opened


class Checkpoint(Shards):
    """The files with their tensors."""

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers in the same type."""
        infos = self.infos[name], self.infos[other]
        if infos[0].dtype != infos[1].dtype:
            return False
        with opened(infos[0].shard, "pt") as file, opened(infos[1].shard, "pt") as other_file:
            return torch.equal(file.get_tensor(infos[0].stored_as), other_file.get_tensor(infos[1].stored_as))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, shard by shard. Each is a view of the mapped file: copy it before the next."""
        for shard in self.paths:
            with opened(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield self.full_name(name), file.get_tensor(name)
