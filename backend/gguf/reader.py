"""A GGUF file's header: metadata, and the place of each tensor. It is checked before it is used, without torch.

The format is ggml's (docs/gguf.md there), versions 2 and 3 in little endian. Counts, lengths and offsets come from the
file, which may be hostile: none is believed beyond the file's bytes, and the memory of a header is bounded.
"""

import mmap
import reprlib
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from backend.errors import ModelLoadError

MAX_HEADER_BYTES = 2**27  # vocabularies of 256,000 tokens take a tenth
MAX_ENTRIES = 2**16  # of metadata, and of tensors
MAX_ELEMENTS = 2**22  # of all arrays of the metadata together
MAX_NAME_BYTES = 2**10
MAX_ALIGNMENT = 2**20
MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A row of numbers is stored in blocks of `size` numbers, each `num_bytes` long."""

    name: str
    size: int
    num_bytes: int

    @property
    def torch_dtype(self) -> str:
        """The type in which torch gets the numbers, in safetensors' words: quantised ones are dequantised."""
        return self.name if self.size == 1 else "F32"


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2),
}
_OTHER_TYPES = {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"}
_OTHER_TYPES |= {21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` is in torch's order: the row length, which ggml names first, is last."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int  # offset in the file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.format.size * self.format.num_bytes


class GgufFile:
    """An open GGUF file. Raises `ModelLoadError`, naming the file and the field, if the header is malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        try:
            header = _Header(path, self._map)
            self.metadata = header.metadata
            self.tensors = header.tensors
        except BaseException:
            self._map.close()
            raise

    def read(self, start: int, num_bytes: int) -> bytearray:
        """Return a copy of bytes of the file, the only one."""
        with memoryview(self._map) as whole, whole[start : start + num_bytes] as part:
            return bytearray(part)

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._map.close()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ModelLoadError(f"{path} is not an ordinary file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelLoadError(f"{path} is empty; download it again") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror})") from None


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at = self._num_elements = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        magic = self._take(4, "magic")
        if magic != b"GGUF":
            raise self._wrong("magic", f"it is {magic!r}; a GGUF file begins with b'GGUF'")
        version = self._integer("I", "version")
        if version not in (2, 3):
            raise self._wrong("version", f"it is {version}; 2 and 3 in little endian are read")
        num_tensors, num_values = self._count("tensor_count"), self._count("metadata_kv_count")
        for index in range(num_values):
            key = self._name(self.metadata, f"metadata key {index}")
            self.metadata[key] = self._value(self._integer("I", key), key)
        self._read_tensors(num_tensors)

    def _wrong(self, field: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {field}: {what}")

    def _take(self, num_bytes: int, field: str) -> bytes:
        start, end = self._at, self._at + num_bytes
        if end > len(self._data):
            size = len(self._data)
            raise self._wrong(field, f"it ends at {end:,}, beyond the file's end at {size:,}; download it again")
        if end > MAX_HEADER_BYTES:
            raise self._wrong(field, f"it ends at {end:,}; of a header at most {MAX_HEADER_BYTES:,} bytes are read")
        self._at = end
        return self._data[start:end]

    def _integer(self, code: str, field: str) -> int:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), field))
        return int(value)

    def _count(self, field: str) -> int:
        count = self._integer("Q", field)
        if count > MAX_ENTRIES:
            raise self._wrong(field, f"it is {count:,}; at most {MAX_ENTRIES:,} are read")
        return count

    def _text(self, field: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self._integer("Q", field)
        if length > most:
            raise self._wrong(field, f"it has {length:,} bytes; at most {most:,} are read")
        try:
            return self._take(length, field).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(field, f"it is not UTF-8 ({error.reason} at byte {error.start})") from None

    def _name(self, known: dict[str, Any], field: str) -> str:
        name = self._text(field, MAX_NAME_BYTES)
        if name in known or not name.isprintable() or not name:
            raise self._wrong(
                field, f"it is {name[:100]!r}, " + ("which is there twice" if name in known else "no name")
            )
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            return self._numbers(kind, 1, key)[0]
        kind, count = self._integer("I", key), self._integer("Q", key)
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise self._wrong(key, f"with its {count:,} elements arrays have over {MAX_ELEMENTS:,}; no more are read")
        if kind == _STRING:
            return [self._text(f"{key}[{index}]") for index in range(count)]
        return list(self._numbers(kind, count, key))

    def _numbers(self, kind: int, count: int, key: str) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            what = "an array of arrays" if kind == _ARRAY else f"of type {kind}, which GGUF does not have"
            raise self._wrong(key, f"it is {what}")
        form = f"<{count}{_SCALARS[kind]}"
        numbers = struct.unpack(form, self._take(struct.calcsize(form), key))
        if kind == _BOOL:
            if max(numbers, default=0) > 1:
                raise self._wrong(key, f"it is {max(numbers)}; a truth value is 0 or 1")
            return tuple(map(bool, numbers))
        return numbers

    def _read_tensors(self, count: int) -> None:
        self._check_whole()
        found = [self._tensor(f"tensor {index}") for index in range(count)]
        alignment = self._alignment()
        start = self._at + -self._at % alignment
        end = 0  # of the tensors before, from where they start
        for tensor in found:
            if tensor.start != end:
                raise self._wrong(
                    f"{tensor.name}.offset", f"it is {tensor.start:,}; {end:,} is where the last one ends"
                )
            end += tensor.num_bytes + -tensor.num_bytes % alignment
            last = start + tensor.start + tensor.num_bytes
            if last > len(self._data):
                raise self._wrong(
                    tensor.name, f"it ends at {last:,}, beyond the file's end at {len(self._data):,}; download it again"
                )
            self.tensors[tensor.name] = StoredTensor(tensor.name, tensor.shape, tensor.format, start + tensor.start)

    def _check_whole(self) -> None:
        split = self.metadata.get("split.count", 0)
        if split not in (0, 1):
            raise self._wrong("split.count", f"it is {split}; merge the parts first: llama-gguf-split --merge")

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        is_power = isinstance(alignment, int) and 8 <= alignment <= MAX_ALIGNMENT and not alignment & (alignment - 1)
        if not is_power:
            raise self._wrong("general.alignment", f"it is {reprlib.repr(alignment)}; a power of 2 from 8 is expected")
        return int(alignment)

    def _tensor(self, field: str) -> StoredTensor:
        """Read one entry, whose `start` is still an offset from the first tensor."""
        name = self._name(self.tensors, field)
        self.tensors[name] = _UNPLACED
        num_dims = self._integer("I", f"{name}.n_dims")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._wrong(f"{name}.n_dims", f"it is {num_dims}; 1 to {MAX_DIMS} are expected")
        shape = tuple(self._integer("Q", f"{name}.dims") for _ in range(num_dims))[::-1]
        kind = self._integer("I", f"{name}.type")
        if kind not in FORMATS:
            supported = ", ".join(one.name for one in FORMATS.values())
            raise self._wrong(f"{name}.type", f"it is {_OTHER_TYPES.get(kind, kind)}; {supported} are read")
        stored = FORMATS[kind]
        if prod(shape) == 0 or shape[-1] % stored.size:
            raise self._wrong(
                f"{name}.dims", f"{list(shape)} are no rows of whole {stored.name} blocks of {stored.size}"
            )
        return StoredTensor(name, shape, stored, self._integer("Q", f"{name}.offset"))


_UNPLACED = StoredTensor("", (), FORMATS[0], 0)
