"""Adapters as PEFT saves them: what is read of them, and what a hostile one is refused for."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.errors import ModelLoadError
from backend.model.adapter_checkpoint import AdapterWeights, places, read_adapter
from backend.model.known_shapes import LLAMA_32M
from backend.model.model_config import ExpertsConfig
from labs.benchmarks.adapters import adapter_tensors, save_adapter
from tests.examples import examples

MODEL = replace(LLAMA_32M, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
RANK, MAX_RANK, BLOCK = 3, 4, 200
TENSORS = adapter_tensors(MODEL, RANK)
EXPERTS = replace(MODEL, experts=ExpertsConfig(4, 2, True))
ATTENTION = {name: tensor for name, tensor in TENSORS.items() if "self_attn" in name}
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def read(directory: Path, dtype: torch.dtype = torch.float32, block: int = BLOCK) -> AdapterWeights:
    return read_adapter(directory, MODEL, dtype, MAX_RANK, block)


def product(weights: AdapterWeights, layer: int, place_a: int, place_b: int, inputs: int, outputs: int) -> torch.Tensor:
    """`scale * B @ A`, put together from the vectors of one part."""
    memory = weights.blocks.flatten()

    def vectors(place: int, width: int) -> torch.Tensor:
        begins = [begin for begin in weights.vectors[layer, place : place + MAX_RANK].tolist() if begin >= 0]
        assert all(begin % BLOCK + width <= BLOCK for begin in begins), "a vector is cut"
        return torch.stack([memory[begin : begin + width] for begin in begins])

    return vectors(place_b, outputs).t() @ vectors(place_a, inputs)


@pytest.mark.parametrize(("keys", "scale"), [({}, 2.0), ({"lora_alpha": 5, "use_rslora": True}, 5 / RANK**0.5)])
def test_vectors_put_together_are_the_scaled_product(tmp_path: Path, keys: dict[str, Any], scale: float) -> None:
    weights = read(save_adapter(tmp_path, TENSORS, RANK, **keys))
    (query, _, value), _, (gate, _), (down,) = places(MAX_RANK)
    of = {
        "self_attn.q_proj": (query, query + 3 * MAX_RANK, 32, 32),
        "self_attn.v_proj": (value, value + 3 * MAX_RANK, 32, 16),
        "mlp.gate_proj": (gate, gate + 2 * MAX_RANK, 32, 48),
        "mlp.down_proj": (down, down + MAX_RANK, 48, 32),
    }
    for name, where in of.items():
        a, b = (TENSORS[f"base_model.model.model.layers.1.{name}.lora_{which}.weight"] for which in "AB")
        torch.testing.assert_close(product(weights, 1, *where), scale * b @ a)


def test_modules_that_an_adapter_leaves_alone_take_no_memory(tmp_path: Path) -> None:
    some = {name: tensor for name, tensor in TENSORS.items() if "q_proj" in name}
    weights, whole = read(save_adapter(tmp_path / "q", some, RANK)), read(save_adapter(tmp_path / "all", TENSORS, RANK))
    assert len(weights.blocks) < len(whole.blocks) / 4
    assert int((weights.vectors >= 0).sum()) == 2 * 2 * RANK
    assert weights.digest != whole.digest


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "raise --max-adapter-rank"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e+300"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"init_lora_weights": "pissa_niter_4"}, "it changes the base model"),
        ({"a_later_invention": 1}, "a_later_invention is 1"),
    ],
)
def test_a_configuration_that_would_compute_something_else_is_refused_by_its_key(
    tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json") as refused:
        read(save_adapter(tmp_path, TENSORS, RANK, **keys))
    assert told in str(refused.value)


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors with others in their place; None: without it."""
    replaced = {**TENSORS, **{f"{FIRST}.lora_{which}.weight": one for which, one in tensors.items()}}
    return {name: one for name, one in replaced.items() if one is not None}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (changed(A=None), "has one of lora_A and lora_B"),
        (changed(A=torch.zeros(RANK, 31)), "has shape [3, 31]; expected is [3, 32]"),
        (changed(B=torch.zeros(32, RANK + 1)), "has shape [32, 4]; expected is [32, 3]"),
        (changed(A=torch.zeros(RANK, 32, dtype=torch.int8)), "is stored as torch.int8"),
        (changed(A=torch.full((RANK, 32), torch.nan)), "holds numbers from nan to nan"),
        (changed(B=torch.full((32, RANK), 1e9)), "beyond 1e+06"),
        (
            {**TENSORS, "base_model.model.lm_head.lora_A.weight": torch.zeros(1)},
            "lm_head.lora_A.weight' is not a lora_A",
        ),
        ({}, "holds no weights"),
    ],
)
def test_tensors_that_do_not_belong_to_the_model_are_refused_by_their_names(
    tmp_path: Path, tensors: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors") as refused:
        read(save_adapter(tmp_path, tensors, RANK))
    assert told in str(refused.value)


def test_an_adapter_of_experts_is_refused_and_one_of_attention_is_read(tmp_path: Path) -> None:
    read_adapter(save_adapter(tmp_path, ATTENTION, RANK), EXPERTS, torch.float32, MAX_RANK, BLOCK)
    expert = {"base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_A.weight": torch.zeros(RANK, 32)}
    with pytest.raises(ModelLoadError, match=r"experts\.1\.gate_proj.*q, k, v or o_proj, as adapters of a model with"):
        read_adapter(save_adapter(tmp_path, ATTENTION | expert, RANK), EXPERTS, torch.float32, MAX_RANK, BLOCK)


def test_files_that_are_missing_too_large_or_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json does not exist"):
        read(tmp_path)
    weights = save_adapter(tmp_path, TENSORS, RANK) / "adapter_model.safetensors"
    weights.unlink()
    with pytest.raises(ModelLoadError, match="does not exist; PEFT"):
        read(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ModelLoadError, match="can run code when loaded"):
        read(tmp_path)
    save_file({"x": torch.zeros(2_000_000)}, weights)
    with pytest.raises(ModelLoadError, match="an ordinary file of at most"):
        read(tmp_path)
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelLoadError, match="an ordinary file of at most"):
        read(tmp_path)


def test_numbers_that_the_type_of_the_model_cannot_hold_are_refused(tmp_path: Path) -> None:
    directory = save_adapter(tmp_path, changed(B=torch.full((32, RANK), 9e5)), RANK)
    with pytest.raises(ModelLoadError, match=r"does not fit torch\.float16"):
        read(directory, torch.float16)
    with pytest.raises(ModelLoadError, match="raise --block-size"):
        read(directory, block=40)


def test_a_damaged_adapter_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    """Bytes of both files changed, cut and repeated at random, for a dense model and for one with experts."""
    save_adapter(tmp_path, ATTENTION, RANK)
    models = MODEL, EXPERTS
    files = [tmp_path / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    whole, generator = [file.read_bytes() for file in files], random.Random(7)
    for _ in range(examples(60, at_night=5000)):
        which = generator.random() < 0.5
        content, header = bytearray(whole[which]), 4000 if which else len(whole[which])
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(min(header, len(content)) or 1)
            match generator.randrange(3):
                case 0:
                    content[at : at + 1] = bytes([generator.randrange(256)])
                case 1:
                    del content[at : at + generator.randrange(1, 40)]
                case 2:
                    content[at:at] = content[at : at + generator.randrange(1, 40)]
        files[which].write_bytes(content)
        said = ""
        try:
            read_adapter(tmp_path, generator.choice(models), torch.float32, MAX_RANK, BLOCK)
        except ModelLoadError as error:
            said = str(error)
        assert not said or str(tmp_path / "adapter_") in said, "the file is named"
        files[which].write_bytes(whole[which])


def test_a_config_with_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, TENSORS, RANK)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelLoadError, match="must hold a JSON object"):
        read(tmp_path)
