"""A GGUF file's tensors, with the interface of a safetensors file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from backend.errors import ModelLoadError
from backend.gguf.architecture import Architecture
from backend.gguf.quants import dequantised, stored_rows
from backend.gguf.reader import GgufFile, StoredTensor


class GgufTensors:
    """The tensors under their names in a checkpoint, in torch's types: quantised ones are float32."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = Architecture(file)
        self._names = self._architecture.names()

    def keys(self) -> list[str]:
        return [*self._names]

    def get_tensor(self, name: str) -> Tensor:
        return self._ordered(name, dequantised(self._file, self._names[name]))

    def get_rows(self, name: str) -> Tensor:
        """Return the rows of a quantised matrix as they are stored: [rows, bytes of a row]."""
        return self._ordered(name, stored_rows(self._file, self._names[name]))

    def get_slice(self, name: str) -> Tensor:
        """Return the whole tensor, to take slices of: blocks consist of rows, so all rows are read first."""
        return self.get_tensor(name)

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        heads = self._architecture.heads_of(name)
        return tensor if heads is None else _unpermuted(self._file, self._names[name], tensor, heads)


@contextmanager
def opened_gguf(path: Path) -> Iterator[GgufTensors]:
    with GgufFile(path) as file:
        yield GgufTensors(file)


def _unpermuted(file: GgufFile, stored: StoredTensor, tensor: Tensor, heads: int) -> Tensor:
    """Return the rows of each head in the order in which its first half rotates with its second."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelLoadError(f"{file.path}: {stored.name} has {rows} rows, which are no pairs of {heads} heads")
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
