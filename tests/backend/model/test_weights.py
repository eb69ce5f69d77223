import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from backend.errors import ModelLoadError
from backend.kernels.reference import ReferenceOps
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig
from backend.model.weights import Checkpoint, checkpoint_names, load_weights, random_weights, with_products_apart
from tests.backend.model.checkpoints import CONFIG, Q_PROJ, TIED, load, save, save_sharded, tensors


def test_q_k_v_and_gate_up_are_fused_in_that_order(tmp_path: Path) -> None:
    stored = tensors()
    layer = load(save(tmp_path, stored)).layers[1]
    q, k, v = (stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (stored[f"model.layers.1.mlp.{name}_proj.bias"] for name in ("gate", "up"))
    assert torch.equal(layer.qkv, torch.cat((q, k, v)))
    assert layer.gate_up_bias is not None
    assert torch.equal(layer.gate_up_bias, torch.cat((gate, up)))


@pytest.mark.parametrize("is_tied", [False, True])
def test_all_but_the_layers_products_are_moved_to_the_device_that_packs_these(is_tied: bool) -> None:
    weights = random_weights(replace(CONFIG, tie_word_embeddings=is_tied), torch.float16)
    moved = with_products_apart(weights, torch.device("meta"))
    assert moved.num_parameters == weights.num_parameters
    assert (moved.lm_head is moved.embedding) is is_tied
    there = {name.rsplit(".", 2)[-2:][0] for name, tensor in checkpoint_names(CONFIG, moved) if tensor.is_meta}
    products = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert there >= {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"}
    kept = {name for name, tensor in checkpoint_names(CONFIG, moved) if not tensor.is_meta}
    assert {name.split(".")[-2] for name in kept} == products
    assert all(name.endswith("weight") for name in kept), "biases are moved"


@pytest.mark.parametrize("write", [save, save_sharded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_arrives_converted(
    write: Callable[[Path, dict[str, Tensor]], object], dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = tensors()
    write(tmp_path, stored)
    for name, target in checkpoint_names(CONFIG, load(tmp_path, dtype=dtype)):
        assert torch.equal(target, stored[name].to(dtype)), name


def test_loaded_weights_outlive_the_file(tmp_path: Path) -> None:
    stored = tensors()
    weights = load(save(tmp_path, stored))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])


def test_progress_adds_up_to_the_bytes_of_the_files_but_for_their_headers(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    told: list[int] = []
    load_weights(tmp_path, CONFIG, torch.float32, progress=told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in tensors().values())
    assert 0 <= Checkpoint(tmp_path).num_bytes - sum(told) < 8192


def test_tied_embeddings_share_memory(tmp_path: Path) -> None:
    weights = load(save(tmp_path, tensors(TIED)), TIED)
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_parameters_are_counted_once(config: ModelConfig) -> None:
    expected = sum(tensor.numel() for tensor in tensors(config).values())
    assert random_weights(config, torch.float32).num_parameters == expected


def test_an_output_matrix_that_is_stored_as_well_is_not_held_twice(tmp_path: Path) -> None:
    stored = tensors(TIED)
    twice = stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    weights = load(save(tmp_path, twice), TIED)
    assert weights.lm_head is weights.embedding
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])


def test_an_output_matrix_stored_apart_is_used_even_if_the_config_ties_it(tmp_path: Path) -> None:
    stored = tensors()
    assert torch.equal(load(save(tmp_path, stored), TIED).lm_head, stored["lm_head.weight"])


def test_rotary_frequencies_of_old_checkpoints_are_tolerated(tmp_path: Path) -> None:
    load(save(tmp_path, tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))


def test_random_weights_are_the_same_for_a_seed_in_every_dtype() -> None:
    wide, narrow = random_weights(CONFIG, torch.float32, seed=3), random_weights(CONFIG, torch.bfloat16, seed=3)
    assert torch.equal(wide.layers[1].down.bfloat16(), narrow.layers[1].down)
    assert not torch.equal(wide.embedding, random_weights(CONFIG, torch.float32, seed=4).embedding)
    assert 0.015 < wide.embedding.std() < 0.025
    assert wide.final_norm.eq(1).all()


def test_the_decoder_takes_its_weights_over() -> None:
    weights = random_weights(CONFIG, torch.float32)
    decoder = Decoder(CONFIG, weights, ReferenceOps(), max_position=16)
    assert weights.layers == []
    assert len(decoder.layers) == CONFIG.num_layers


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (None, r"model\.safetensors lacks {}, which config\.json calls for"),
        (torch.ones(24, 23), r"{} has shape \[24, 23\], but config\.json calls for \[24, 24\]"),
        (
            torch.ones(24, 24, dtype=torch.int8),
            r"{} is stored as I8; .* quantised weights as config\.json",
        ),
    ],
    ids=["missing", "of another shape", "quantised"],
)
def test_a_tensor_that_is_not_what_the_config_calls_for_is_named(
    tensor: Tensor | None, complaint: str, tmp_path: Path
) -> None:
    stored = tensors()
    del stored[Q_PROJ]
    with pytest.raises(ModelLoadError, match=complaint.format(Q_PROJ)):
        load(save(tmp_path, stored if tensor is None else stored | {Q_PROJ: tensor}))


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    stored = {name: tensor for name, tensor in tensors().items() if "layers.1" not in name}
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.1\.\S+, \S+, \S+ and 15 more"):
        load(save(tmp_path, stored))


def test_a_missing_output_matrix_suggests_tying(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r'lacks lm_head\.weight.*set "tie_word_embeddings": true'):
        load(save(tmp_path, tensors(TIED)))


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds model\.layers\.0\.lora_A, which Qwen3ForCausalLM .* does not use"):
        load(save(tmp_path, tensors() | {"model.layers.0.lora_A": torch.ones(2)}))


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    stored = tensors() | {Q_PROJ: torch.full((24, 24), 1e5, dtype=torch.bfloat16)}
    with pytest.raises(ModelLoadError, match=rf"{Q_PROJ} does not fit torch.float16; serve it as torch.bfloat16"):
        load(save(tmp_path, stored), dtype=torch.float16)


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf, 2.0**100, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_damaged_number_is_refused_and_its_tensor_named(damage: float, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    stored[Q_PROJ][3, 7] = damage
    with pytest.raises(
        ModelLoadError, match=rf"model\.safetensors: {Q_PROJ} holds numbers from .*is damaged, download"
    ):
        load(save(tmp_path, stored))


def test_a_checkpoint_written_back_is_the_same(tmp_path: Path) -> None:
    weights = load(save(tmp_path, tensors()))
    written = {name: target.contiguous() for name, target in checkpoint_names(CONFIG, weights)}
    (tmp_path / "again").mkdir()
    save(tmp_path / "again", written)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors().items())
