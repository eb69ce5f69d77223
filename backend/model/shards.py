"""The headers of a model's weight files, read without torch, which takes seconds to import."""

import reprlib
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from backend.errors import ModelLoadError
from backend.gguf.architecture import Architecture
from backend.gguf.reader import GgufFile
from backend.json_file import JsonFile
from backend.model.quantization import QuantizedWeight, combined, read_quantization
from backend.model.tensor_info import TensorInfo

NAME_MAX = 255  # bytes of a file name on Linux
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
GGUF_LINK = "model.gguf"  # in the folder that `gguf_folder` makes of a file
_BASE, _HEAD = "model.", "lm_head."
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DEQUANTISED_BYTES = 4  # of a number


class Shards:
    """One model.safetensors, or the shards that model.safetensors.index.json lists, or a GGUF file.

    The constructor reads every header, so that a missing, truncated or contradictory file is found before any tensor is
    read. ModelLoadError names the file. Tensors have the names of a causal language model: tensors of a base model that
    was saved by itself get the prefix that they lack. The parts of a quantised weight count as one tensor.
    """

    def __init__(self, directory: Path) -> None:
        self.source, listed = _shards(directory)
        self.paths = sorted(listed)
        self.num_bytes = sum(_size(shard, self.source) for shard in self.paths)
        stored: dict[str, TensorInfo] = {}
        for shard in self.paths:
            infos = _read_header(shard)
            _compare_with_index(self.source, shard, set(infos), listed[shard])
            stored.update(infos)
        self._is_base = not any(name.startswith(_BASE) for name in stored)
        self.infos = {self.full_name(name): info for name, info in stored.items()}
        self.quantized: dict[str, QuantizedWeight] = {}
        quantization = read_quantization(directory)
        if quantization is not None:
            self.infos, self.quantized = combined(self.infos, quantization)
        if is_gguf(self.source) or self.quantized:  # bytes are counted as they come out of it
            self.num_bytes = sum(prod(info.shape) * self.num_size(name) for name, info in self.infos.items())

    def full_name(self, stored_as: str) -> str:
        """Return the full name of the tensor that a shard stores under this name."""
        return _BASE + stored_as if self._is_base and not stored_as.startswith(_HEAD) else stored_as

    def num_size(self, name: str) -> int:
        """Return the bytes of each number of a tensor as it is read."""
        return _DEQUANTISED_BYTES if name in self.quantized else _BYTES.get(self.infos[name].dtype, 1)

    @property
    def dtype(self) -> str | None:
        """The type of most of the numbers, in torch's words; None if no model is served in it."""
        counts: Counter[str] = Counter()
        for info in self.infos.values():
            counts[info.dtype] += prod(info.shape)
        return _DTYPES.get(max(counts, key=lambda dtype: counts[dtype], default=""))


def _shards(directory: Path) -> tuple[Path, dict[Path, set[str] | None]]:
    """Return the checkpoint's main file, and each shard with the tensors that an index expects in it."""
    single, index, gguf = directory / _SINGLE, directory / _INDEX, directory / GGUF_LINK
    if single.exists():
        return single, {single: None}
    if index.exists():
        return index, _read_index(index)
    if gguf.exists():
        file = gguf.readlink() if gguf.is_symlink() else gguf
        return file, {file: None}
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
        if not _is_shard_name(shard):
            raise ModelLoadError(
                f"{index}: weight_map.{tensor:.100} is {reprlib.repr(shard)}; a .safetensors file of the same folder "
                "is expected"
            )
        names.setdefault(index.parent / shard, set()).add(tensor)
    return dict(names)


def _is_shard_name(shard: object) -> bool:
    """Return True for the name of a file in the folder of the index, and nowhere else."""
    if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
        return False
    return shard.isprintable() and len(shard.encode(errors="replace")) <= NAME_MAX


def _size(shard: Path, source: Path) -> int:
    try:
        status = shard.stat()
    except FileNotFoundError:
        raise ModelLoadError(f"{shard} does not exist, but {source.name} lists it; download it again") from None
    except OSError as error:
        raise ModelLoadError(f"{shard} cannot be read ({error.strerror}); download it again") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{shard} is not an ordinary file; download it again")
    return status.st_size


@contextmanager
def opened(shard: Path, framework: str) -> Iterator[Any]:
    """Open a shard, whose tensors are those of `framework`: "np" or "pt"."""
    try:
        with safe_open(str(shard), framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{shard} is truncated, corrupt or unreadable ({error}); download it again") from error


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def _read_header(shard: Path) -> dict[str, TensorInfo]:
    if is_gguf(shard):
        with GgufFile(shard) as file:
            names = Architecture(file).names().items()
        return {
            name: TensorInfo(
                shard, name, one.shape, one.format.torch_dtype, None, None if one.format.size == 1 else one.format.name
            )
            for name, one in names
        }
    with opened(shard, "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        infos = {name: TensorInfo(shard, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
        shapes = [name for name in infos if name.endswith(".weight_shape")]
        for name in [one for one in shapes if infos[one].shape == (2,) and infos[one].dtype in ("I32", "I64")]:
            infos[name] = replace(infos[name], values=tuple(file.get_tensor(name).tolist()))
        return infos


def _compare_with_index(source: Path, shard: Path, held: set[str], listed: set[str] | None) -> None:
    """Refuse a shard whose tensors differ from its index."""
    if listed is None or held == listed:
        return
    name = min(held ^ listed)
    found, expected = ("holds", "does not") if name in held else ("does not hold", "does")
    raise ModelLoadError(
        f"{shard} {found} {name}, but {source.name} {expected} list it there; the two do not belong together: "
        f"download both again"
    )
