"""Checkpoints, plain, sharded and of every quantisation, with faults in their files and configs."""

import json
import random
import resource
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.errors import ModelLoadError
from backend.model.weights import load_weights
from tests.backend.model.checkpoints import save, save_sharded, tensors, write_index
from tests.backend.model.test_config_mutations import WHOLE
from tests.backend.model.test_quantization import SCHEMES, SHAPES, quantised
from tests.examples import examples

PLAIN, SHARDED = "plain", "sharded"
NUM_MUTATIONS = examples(12, at_night=400)  # of each kind of checkpoint, of which there are fourteen
MOST_KIB = 64 * 1024  # that a refusal may take
VALUES: list[Any] = [
    *(None, True, *WHOLE, -0.5, float("nan"), "", "x", [], {}, [[]], {"weights": 3}, {"format": []}),
    *([0, 0], [2**40, 1], [1, -1], ["1", "2"], [16, 32, 1], {"group_0": None}, {"group_0": {"weights": {}}}),
    *("gptq", "gptq_v2", "awq", "fp8", "mxfp4", "compressed-tensors", "pack-quantized", "int-quantized"),
    *("F8_E4M3", "I32", "U8", "BOOL", "F64", [10**18, 10**18], [-1, 4], [2**63 - 1, 2**63]),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every object and list within a value, each with a key of its own."""
    keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [inner for key in keys for inner in places(value[key])]


def change(value: Any, chance: random.Random) -> None:
    """Change, add or remove something within a JSON object."""
    owner, key = chance.choice(places(value) or [(value, "x")])
    if isinstance(owner, dict) and chance.random() < 0.25:
        owner.pop(key, None)
    else:
        owner[key] = chance.choice(VALUES)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with another header, or with some bytes of it changed."""
    data, length = bytearray(content), struct.unpack("<Q", content[:8])[0]
    kind = chance.randrange(4)
    if kind < 2:
        header = json.loads(content[8 : 8 + length])
        change(header, chance)
        said = json.dumps(header).encode()
        return struct.pack("<Q", len(said)) + said + content[8 + length :]
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(8 + length)
        if kind == 2:
            data[at] ^= 1 << chance.randrange(8)
        else:
            del data[at : at + chance.randint(1, 60)]
    return bytes(data)


def outcome(folder: Path) -> str:
    said = ""
    try:
        load_weights(folder, SHAPES, torch.float32)
    except ModelLoadError as error:
        said = str(error)
    assert not said or (str(folder) in said and len(said) < 3000), said
    return "refused" if said else "loaded"


@pytest.mark.parametrize("kind", [PLAIN, SHARDED, *SCHEMES])
def test_a_checkpoint_with_a_fault_is_refused_by_its_file_or_loads(kind: str, tmp_path: Path) -> None:
    chance, found = random.Random(kind), Counter[str]()
    if kind in SCHEMES:
        stored, _ = quantised(tmp_path, SCHEMES[kind])
    else:
        stored = tensors(SHAPES)
        (tmp_path / "config.json").write_text("{}")
    index = save_sharded(tmp_path, stored) if kind == SHARDED else {}
    if kind != SHARDED:
        save(tmp_path, stored)
    file = tmp_path / ("model-1.safetensors" if kind == SHARDED else "model.safetensors")
    content, config = file.read_bytes(), json.loads((tmp_path / "config.json").read_text())
    assert outcome(tmp_path) == "loaded"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(NUM_MUTATIONS):
        if kind in SCHEMES and number % 2:
            changed = json.loads(json.dumps(config))
            change(changed["quantization_config"], chance)
            (tmp_path / "config.json").write_text(json.dumps(changed))
        elif index and number % 2:
            changed = {"weight_map": dict(index)}
            change(changed, chance)
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        else:
            file.write_bytes(damaged(content, chance))
        found[outcome(tmp_path)] += 1
        file.write_bytes(content)
        (tmp_path / "config.json").write_text(json.dumps(config))
        if index:
            write_index(tmp_path, index)
    assert outcome(tmp_path) == "loaded" and found["refused"] > NUM_MUTATIONS / 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB
