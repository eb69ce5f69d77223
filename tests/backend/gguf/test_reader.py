"""Hostile and damaged files: the error names the file and the field, in bounded time and memory."""

import random
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch

from backend.errors import ModelLoadError
from backend.gguf.reader import GgufFile
from backend.model import gguf_folder
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.text.tokenizer import Tokenizer
from tests.backend.families import random_model
from tests.backend.gguf.files import Stored, entry, gguf, metadata_of, save, tensors_of, words
from tests.examples import examples

ONE: dict[str, Stored] = {"a": ((2, 32), "Q8_0", bytes(68))}
HUGE = struct.pack("<Q", 2**63 - 1)
NUM_MUTATIONS = examples(600, at_night=5_000)


def opened(path: Path) -> GgufFile:
    with GgufFile(path) as file:
        return file


def header(num_tensors: int = 0, num_values: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def key(name: str, kind: int, rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + rest


def tensor(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 8, offset: int = 0) -> bytes:
    text = struct.pack("<Q", len(name)) + name.encode()
    return text + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


FAULTS = {
    "nothing": (b"", "is empty"),
    "another format": (b"PK\x03\x04" + bytes(60), r"magic: it is b'PK"),
    "the first version": (header(version=1), "version: it is 1; 2 and 3"),
    "big endian": (header(version=0x03000000), "version: it is 50331648"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), r"tensor_count: it ends at 16, beyond the file's end at 8"),
    "tensors without end": (header(2**62), "tensor_count: it is 4,611,686,018,427,387,904; at most 65,536"),
    "values without end": (header(0, 2**62), "metadata_kv_count: it is"),
    "fewer values": (header(0, 3, entry("a", 1)), "metadata key 1: it ends at"),
    "a name without end": (header(0, 1, HUGE), r"metadata key 0: it has 9,223,372,036,854,775,807 bytes; at most"),
    "a name that is none": (header(0, 1, entry("a\nb", 1)), r"metadata key 0: it is 'a\\nb', no name"),
    "a name twice": (header(0, 2, entry("a", 1) * 2), "metadata key 1: it is 'a', which is there twice"),
    "a text without end": (header(0, 1, key("a", 8, HUGE)), "a: it has 9,223"),
    "a text beyond the end": (header(0, 1, key("a", 8, struct.pack("<Q", 99))), "a: it ends at 144, beyond"),
    "a text that is none": (header(0, 1, key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "a: it is not UTF-8"),
    "a type that is none": (header(0, 1, key("a", 77, bytes(8))), "a: it is of type 77"),
    "an array without end": (header(0, 1, key("a", 9, struct.pack("<I", 0) + HUGE)), "a: with its 9,223"),
    "texts without end": (header(0, 1, key("a", 9, struct.pack("<IQ", 8, 2**22))), r"a\[0\]: it ends at"),
    "arrays that are long together": (
        header(0, 3, b"".join(key(name, 9, struct.pack("<IQ", 0, 2**21) + bytes(2**21)) for name in "abc")),
        "c: with its 2,097,152 elements arrays have over 4,194,304",
    ),
    "an array of arrays": (header(0, 1, key("a", 9, struct.pack("<IQ", 9, 1))), "a: it is an array of arrays"),
    "neither true nor false": (header(0, 1, key("a", 7, b"\x02")), "a: it is 2; a truth value"),
    "an odd alignment": (gguf({"general.alignment": 24}, ONE), r"general\.alignment: it is 24; a power of 2"),
    "an alignment without end": (gguf({"general.alignment": 2**31}, ONE), r"general\.alignment: it is 2147483648"),
    "an alignment that is a text": (gguf({"general.alignment": "x" * 999}, ONE), r"general\.alignment: it is 'xxx"),
    "no dimensions": (header(1, 0, tensor(dims=())), r"a\.n_dims: it is 0; 1 to 4"),
    "dimensions without end": (header(1, 0, struct.pack("<Q", 1) + b"a" + b"\xff" * 4), r"a\.n_dims: it is 4294967295"),
    "an empty tensor": (header(1, 0, tensor(dims=(0, 2))), r"a\.dims: \[2, 0\] are no rows"),
    "half a block": (header(1, 0, tensor(dims=(48, 2))), r"a\.dims: \[2, 48\] are no rows of whole Q8_0"),
    "numbers without end": (header(1, 0, tensor(dims=(2**62, 2**62)) + bytes(64)), "a: it ends at .*, beyond the"),
    "a type that is not read": (header(1, 0, tensor(kind=10)), r"a\.type: it is Q2_K; F32, F16, Q4_0"),
    "a type of tensors that is none": (header(1, 0, tensor(kind=999)), r"a\.type: it is 999; F32"),
    "an offset elsewhere": (header(1, 0, tensor(offset=32) + bytes(200)), r"a\.offset: it is 32; 0 is where"),
    "tensors over each other": (header(2, 0, tensor() + tensor("b") + bytes(300)), r"b\.offset: it is 0; 96 is where"),
    "a tensor twice": (header(2, 0, tensor() * 2 + bytes(300)), "tensor 1: it is 'a', which is there twice"),
    "a file that ends early": (gguf({}, ONE)[:-40], r"a: it ends at 164, beyond the file's end at 152; download"),
    "a part of a file": (gguf({"split.count": 2}, ONE), r"split\.count: it is 2; merge"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    path = save(tmp_path / "a.gguf", content)
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=message) as refused:
        opened(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(refused.value) and len(str(refused.value)) < 500
    assert peak < len(content) * 12 + 2**20


def test_a_gguf_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"a\.gguf cannot be read \(No such file"):
        opened(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match=r"cannot be read \(Is a directory"):
        opened(tmp_path)


def test_a_file_of_the_second_version_and_of_another_alignment_is_read(tmp_path: Path) -> None:
    content = gguf(
        {"general.alignment": 64, "b": [1, -2], "c": [True, False], "d": 0.5, "e": -3}, ONE | {"z": ONE["a"]}, 64
    )
    file = opened(save(tmp_path / "a.gguf", content.replace(struct.pack("<I", 3), struct.pack("<I", 2), 1)))
    assert file.metadata == {"general.alignment": 64, "b": [1, -2], "c": [True, False], "d": 0.5, "e": -3}
    assert [(one.shape, one.format.name, one.start % 64) for one in file.tensors.values()] == [((2, 32), "Q8_0", 0)] * 2


def test_a_tensor_is_in_memory_once_while_it_is_read(tmp_path: Path) -> None:
    """The largest, over the vocabulary, has gigabytes."""
    size = 2**22
    with GgufFile(save(tmp_path / "a.gguf", gguf({}, {"a": ((size // 4,), "F32", bytes(size))}))) as file:
        tracemalloc.start()
        try:
            assert len(file.read(file.tensors["a"].start, size)) == size
            assert tracemalloc.get_traced_memory()[1] < 1.5 * size
        finally:
            tracemalloc.stop()


def mutated(content: bytes, head: int, chance: random.Random) -> bytes:
    """A file of which a few bytes are others, or some are missing, most of them of its header."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(head, len(data)) if chance.random() < 0.9 else len(data))
        match chance.randrange(5):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
            case 2:
                data[at : at + chance.randint(1, 40)] = b""
            case 3:
                data[at:at] = chance.randbytes(chance.randint(1, 12))
            case 4:
                del data[at + 9 :]
    return bytes(data)


def test_a_file_with_faults_is_refused_by_name_or_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "cache_directory", lambda: tmp_path / "cache")
    model, chance = random_model("llama3-scaling"), random.Random(3)
    keys = {"tokenizer.chat_template": "{% for one in messages %}{{ one.content }}{% endfor %}"}
    metadata, tensors = metadata_of(model) | words(131) | keys, tensors_of(model)
    content = gguf(metadata, tensors)
    head = len(gguf(metadata, {name: (shape, kind, b"") for name, (shape, kind, _) in tensors.items()}))
    outcomes = Counter(outcome(tmp_path / "a.gguf", mutated(content, head, chance)) for _ in range(NUM_MUTATIONS))
    assert outcomes["refused"] > NUM_MUTATIONS / 2


def outcome(path: Path, content: bytes) -> str:
    """Load a file as far as weights and tokenizer go."""
    path.unlink(missing_ok=True)
    save(path, content)
    try:
        directory = resolve_model(str(path))
        config = read_model_config(directory)
        load_weights(directory, config, torch.float32)
        Tokenizer.from_dir(directory, config.vocab_size).close()
    except ModelLoadError as error:
        said = str(error)
    else:
        return "loaded"
    assert "/a" in said and len(said) < 2000, said
    return "refused"
