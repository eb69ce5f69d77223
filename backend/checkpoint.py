"""The safetensors files of a model directory: which tensors they hold, and the tensors one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.errors import ModelLoadError
from backend.json_file import JsonFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a shard's header says of one tensor."""

    shard: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' words: "F32", "BF16", "I8"


class Checkpoint:
    """One model.safetensors, or the shards that model.safetensors.index.json lists.

    Making one reads every header, so that whatever is missing, truncated or contradictory is found before any
    tensor is read. ModelLoadError names the file.
    """

    def __init__(self, directory: Path) -> None:
        self.source, listed = _shards(directory)
        self._shards = sorted(listed)
        self.num_bytes = sum(_size(shard, self.source) for shard in self._shards)
        self.infos: dict[str, TensorInfo] = {}
        for shard in self._shards:
            infos = _read_header(shard)
            _compare_with_index(self.source, shard, set(infos), listed[shard])
            self.infos.update(infos)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers in the same type."""
        infos = self.infos[name], self.infos[other]
        if infos[0].dtype != infos[1].dtype:
            return False
        with _opened(infos[0].shard) as file, _opened(infos[1].shard) as other_file:
            return torch.equal(file.get_tensor(name), other_file.get_tensor(other))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, shard by shard. Each is a view of the mapped file: copy it before the next."""
        for shard in self._shards:
            with _opened(shard) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)


def _shards(directory: Path) -> tuple[Path, dict[Path, set[str] | None]]:
    """The file that speaks for the checkpoint, and each shard with the tensors that an index expects in it."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return single, {single: None}
    if index.exists():
        return index, _read_index(index)
    if any(directory.glob("*.bin")):
        raise ModelLoadError(
            f"{directory} holds only .bin weights, which can run code when loaded; convert them with transformers: "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes {_SINGLE}"
        )
    raise ModelLoadError(f"{directory} holds neither {_SINGLE} nor {_INDEX}; is it a model directory?")


def _read_index(index: Path) -> dict[Path, set[str] | None]:
    file = JsonFile.read(index)
    weight_map = file.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map must be an object from tensor names to file names")
    names: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelLoadError(
                f"{index}: weight_map.{tensor} is {shard!r}; a .safetensors file of the same folder is expected"
            )
        names.setdefault(index.parent / shard, set()).add(tensor)
    return dict(names)


def _size(shard: Path, source: Path) -> int:
    try:
        return shard.stat().st_size
    except FileNotFoundError:
        raise ModelLoadError(f"{shard} does not exist, but {source.name} lists it; download it again") from None


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    try:
        with safe_open(str(shard), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{shard} is truncated, corrupt or unreadable ({error}); download it again") from error


def _read_header(shard: Path) -> dict[str, TensorInfo]:
    with _opened(shard) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return {name: TensorInfo(shard, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _compare_with_index(source: Path, shard: Path, held: set[str], listed: set[str] | None) -> None:
    """Refuse a shard that holds something else than its index says."""
    if listed is None or held == listed:
        return
    name = min(held ^ listed)
    found, expected = ("holds", "does not") if name in held else ("does not hold", "does")
    raise ModelLoadError(
        f"{shard} {found} {name}, but {source.name} {expected} list it there; the two do not belong together: "
        f"download both again"
    )
