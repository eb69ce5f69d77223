"""Quantised checkpoints are served as their dequantised weights. Each scheme is packed here by its definition."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backend.config import EngineOptions
from backend.errors import ModelLoadError
from backend.kernels import build, integers
from backend.llm import LLM
from backend.model.model_config import read_model_config
from backend.model.weights import Checkpoint, checkpoint_names, load_weights
from backend.sampling_params import SamplingParams
from tests.backend.families import random_model, save_checkpoint
from tests.backend.model.checkpoints import CONFIG, save, save_sharded, tensors

SHAPES = replace(CONFIG, hidden_size=32, intermediate_size=48, head_dim=8, attention_bias=False, mlp_bias=False)
SHAPES = replace(SHAPES, output_bias=False)
GROUP = 16  # columns
Parts = dict[str, Tensor]


def packed(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned integers of a matrix along a dimension, from the lowest bits of each word up, padded with zeros."""
    rows = numbers.long() if dim == 1 else numbers.long().T
    per_word = 32 // bits
    padding = -rows.shape[1] % per_word
    words = torch.nn.functional.pad(rows, (0, padding)).unflatten(1, (-1, per_word))
    total = (words << (bits * torch.arange(per_word))).sum(2)
    signed = torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)
    return signed if dim == 1 else signed.T.contiguous()


def drawn(shape: tuple[int, ...], bits: int, signed: bool) -> Tensor:
    low = -(2 ** (bits - 1)) if signed else 0
    return torch.randint(low, low + 2**bits, shape)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def by_block(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of each weight; blocks at the end may be smaller."""
    high, wide = -(-rows // scale.shape[0]), -(-columns // scale.shape[1])
    return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


@dataclass(frozen=True)
class Scheme:
    config: dict[str, Any]
    of: Callable[[int, int], tuple[Parts, Tensor]]  # rows and columns: the stored parts, and the weight that they mean


def fp8(rows: int, columns: int) -> tuple[Parts, Tensor]:
    stored, scale = torch.randn(rows, columns).to(torch.float8_e4m3fn), scales(-(-rows // 16), -(-columns // 32))
    spread = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * spread


def fp8_of_rows(rows: int, columns: int) -> tuple[Parts, Tensor]:
    stored, scale = torch.randn(rows, columns).to(torch.float8_e4m3fn), scales(rows, 1)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.ones(1)}, stored.float() * scale


def fp8_of_a_tensor(rows: int, columns: int) -> tuple[Parts, Tensor]:
    stored, scale = torch.randn(rows, columns).to(torch.float8_e4m3fn), scales(1)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8(rows: int, columns: int) -> tuple[Parts, Tensor]:
    stored, zero, scale = drawn((rows, columns), 8, True), drawn((rows, 1), 8, True), scales(rows, 1)
    parts = {"weight": stored.to(torch.int8), "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return parts, (stored - zero) * scale


def pack(bits: int, has_zero: bool, is_reordered: bool) -> Callable[[int, int], tuple[Parts, Tensor]]:
    def parts_of(rows: int, columns: int) -> tuple[Parts, Tensor]:
        groups, offset = columns // GROUP, 2 ** (bits - 1)
        stored, scale = drawn((rows, columns), bits, True), scales(rows, groups)
        zero = drawn((rows, groups), bits, True) if has_zero else torch.zeros(rows, groups)
        index = torch.arange(columns) // GROUP
        parts = {
            "weight_packed": packed(stored + offset, bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if has_zero:
            parts["weight_zero_point"] = packed(zero + offset, bits, 0)
        if is_reordered:
            index = index[torch.randperm(columns)]
            parts["weight_g_idx"] = index.int()
        return parts, (stored - zero[:, index]) * scale[:, index]

    return parts_of


def gptq(bits: int, less: int, is_reordered: bool) -> Callable[[int, int], tuple[Parts, Tensor]]:
    def parts_of(rows: int, columns: int) -> tuple[Parts, Tensor]:
        groups = -(-columns // GROUP)  # the last one may be smaller
        stored, scale = drawn((columns, rows), bits, False), scales(groups, rows)
        zero = torch.randint(1, 2**bits, (groups, rows))
        index = torch.arange(columns) // GROUP
        if is_reordered:
            index = index[torch.randperm(columns)]
        parts = {
            "qweight": packed(stored, bits, 0),
            "qzeros": packed(zero - less, bits, 1),
            "scales": scale,
            "g_idx": index.int(),
        }
        return parts, ((stored - zero[index]) * scale[index]).T

    return parts_of


def awq(rows: int, columns: int) -> tuple[Parts, Tensor]:
    groups, order = columns // GROUP, [0, 2, 4, 6, 1, 3, 5, 7]
    stored, zero, scale = drawn((columns, rows), 4, False), drawn((groups, rows), 4, False), scales(groups, rows)

    def in_order(numbers: Tensor) -> Tensor:
        return packed(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4, 1)

    parts = {"qweight": in_order(stored), "qzeros": in_order(zero), "scales": scale}
    index = torch.arange(columns) // GROUP
    return parts, ((stored - zero[index]) * scale[index]).T


def compressed(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


SCHEMES = {
    "fp8 by blocks": Scheme({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8),
    "fp8 by rows": Scheme(compressed("float-quantized", 8), fp8_of_rows),
    "fp8 by tensors": Scheme(compressed("naive-quantized", 8), fp8_of_a_tensor),
    "fp8 by blocks, compressed": Scheme(compressed("float-quantized", 8, block_structure=[16, 32]), fp8),
    "int8 with zero points": Scheme(compressed("int-quantized", 8), int8),
    "packed, 4 bits": Scheme(compressed("pack-quantized", 4), pack(4, has_zero=False, is_reordered=False)),
    "packed, 8 bits with zero points": Scheme(compressed("pack-quantized", 8), pack(8, True, False)),
    "packed, 3 bits, reordered": Scheme(compressed("pack-quantized", 3), pack(3, True, True)),
    "gptq, 4 bits": Scheme({"quant_method": "gptq", "bits": 4}, gptq(4, 1, False)),
    "gptq, 8 bits, reordered": Scheme({"quant_method": "gptq", "bits": 8, "desc_act": True}, gptq(8, 1, True)),
    "gptq v2": Scheme({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0, False)),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
}


def quantised(directory: Path, scheme: Scheme) -> tuple[Parts, Parts]:
    """The tensors of a checkpoint with its products quantised, and what they mean; config.json is written."""
    torch.manual_seed(3)
    stored, meant = dict[str, Tensor](), tensors(SHAPES)
    for name, tensor in [*meant.items()]:
        if "_proj." in name:
            parts, meant[name] = scheme.of(*tensor.shape)
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = tensor
    (directory / "config.json").write_text(json.dumps({"quantization_config": scheme.config}))
    return stored, meant


@pytest.mark.parametrize("write", [save, save_sharded])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_weights_are_their_numbers_less_zero_points_times_scales(
    scheme: Scheme, write: Callable[[Path, Parts], object], tmp_path: Path
) -> None:
    stored, meant = quantised(tmp_path, scheme)
    write(tmp_path, stored)
    told: list[int] = []
    weights = load_weights(tmp_path, SHAPES, torch.float32, progress=told.append)
    for name, target in checkpoint_names(SHAPES, weights):
        assert torch.allclose(target, meant[name], rtol=1e-6, atol=1e-6), name
    assert Checkpoint(tmp_path).num_bytes == sum(told)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_part_that_is_missing_or_does_not_fit_is_named(scheme: Scheme, tmp_path: Path) -> None:
    stored, _ = quantised(tmp_path, scheme)
    optional = {"input_scale", "weight_zero_point", "g_idx", "weight_g_idx"}
    layer = "model.layers.1.mlp.up_proj."
    for name in [name for name in stored if name.startswith(layer)]:
        part = name.removeprefix(layer)
        cases = {} if part in optional else {"missing": {other: stored[other] for other in stored if other != name}}
        if part != "input_scale":
            cases |= {"of another type": stored | {name: torch.zeros(stored[name].shape, dtype=torch.bool)}}
            cases |= {"of another shape": stored | {name: stored[name].new_zeros(3, 7, 1)}}
        for what, faulty in cases.items():
            save(tmp_path, faulty)
            with pytest.raises(ModelLoadError, match=r"up_proj") as refused:
                load_weights(tmp_path, SHAPES, torch.float32)
            assert str(tmp_path) in str(refused.value), what


EMPTY = {"weight": torch.zeros(0, 32, dtype=torch.int8), "weight_scale": torch.zeros(0, 1)}
ROWS_OF_44 = {
    "qweight": torch.zeros(4, 44, dtype=torch.int32),
    "qzeros": torch.zeros(2, 5, dtype=torch.int32),
    "scales": torch.ones(2, 44),
}


@pytest.mark.parametrize(
    ("scheme", "parts", "told"),
    [
        ("packed, 4 bits", {"weight_shape": torch.tensor([48.0, 32.0])}, "the rows and columns of the weight"),
        ("packed, 4 bits", {"weight_shape": torch.tensor([48, 32]).bfloat16()}, "the rows and columns of the weight"),
        ("packed, 4 bits", {"weight_shape": torch.tensor([2**62, -1])}, "is expected"),
        ("packed, 4 bits", {"weight": torch.zeros(48, 32)}, "weight is stored beside it"),
        ("int8 with zero points", EMPTY, "of at least 1"),
        ("gptq, 4 bits", ROWS_OF_44, "words of 8"),
        ("fp8 by rows", {"weight_scale_inv": torch.ones(48, 1)}, "weight_scale is stored beside it"),
    ],
)
def test_parts_that_would_be_misread_are_refused(scheme: str, parts: Parts, told: str, tmp_path: Path) -> None:
    stored, _ = quantised(tmp_path, SCHEMES[scheme])
    save(tmp_path, stored | {f"model.layers.1.mlp.up_proj.{name}": part for name, part in parts.items()})
    with pytest.raises(ModelLoadError, match=rf"up_proj.*{told}"):
        load_weights(tmp_path, SHAPES, torch.float32)


@pytest.mark.parametrize("part", ["g_idx", "weight_g_idx"])
@pytest.mark.parametrize("group", [-1, 99])
def test_a_group_without_a_scale_is_refused(part: str, group: int, tmp_path: Path) -> None:
    scheme = SCHEMES["gptq, 8 bits, reordered" if part == "g_idx" else "packed, 3 bits, reordered"]
    stored, _ = quantised(tmp_path, scheme)
    stored[f"model.layers.0.mlp.up_proj.{part}"][5] = group
    save(tmp_path, stored)
    with pytest.raises(ModelLoadError, match=r"up_proj\.(weight_)?g_idx names group"):
        load_weights(tmp_path, SHAPES, torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; .* and mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; 2, 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        (compressed("nvfp4-pack-quantized", 4), "format is 'nvfp4-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is missing"),
        (compressed("pack-quantized", 16), "num_bits is 16"),
        (compressed("pack-quantized", 4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("int4", "quantization_config is 'int4'; an object"),
    ],
)
def test_a_scheme_that_is_not_supported_is_named(config: object, message: str, tmp_path: Path) -> None:
    save(tmp_path, tensors(SHAPES))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint(tmp_path)


def test_a_quantised_checkpoint_is_served_as_the_plain_one_that_it_means(tmp_path: Path) -> None:
    plain, compact = tmp_path / "plain", tmp_path / "compact"
    save_checkpoint("qwen3", plain)
    compact.mkdir()
    scheme, meant, stored = SCHEMES["gptq, 4 bits"], load_file(plain / "model.safetensors"), dict[str, Tensor]()
    torch.manual_seed(4)
    for name, tensor in [*meant.items()]:
        if "_proj." in name:
            parts, weight = scheme.of(*tensor.shape)
            parts["scales"], meant[name] = parts["scales"] / 32, (weight / 32).contiguous()
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = tensor
    save(plain, meant)
    save(compact, stored)
    config = json.loads((plain / "config.json").read_text())
    (compact / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    (compact / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = EngineOptions(max_num_seqs=1, max_model_len=32, max_num_batched_tokens=32)
    answers = [LLM(str(path), options).generate([[3, 1, 4, 1, 5]], greedy, False, False) for path in (plain, compact)]
    assert answers[0][0].token_ids == answers[1][0].token_ids


def test_weights_rounded_to_eight_bits_at_load_are_served_as_what_they_mean(tmp_path: Path) -> None:
    if build.load_library(wait=True) is None:
        pytest.skip("no C++ compiler")
    save_checkpoint("qwen3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in stored.items():
        if tensor.dim() == 2 and "embed_tokens" not in name:
            stored[name] = integers.rounded(tensor, 8).dequantised()[:, : tensor.shape[1]].contiguous()
    save(tmp_path, stored)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = EngineOptions(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=64)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    plain, rounded = (
        LLM(str(tmp_path), replace(options, quantization=how), kernels="native").generate(prompts, greedy, False, False)
        for how in ("none", "int8")
    )
    assert [one.token_ids for one in plain] == [one.token_ids for one in rounded]


def microscaled(directory: Path, **changes: Tensor | None) -> Path:
    """A gpt-oss whose experts are in MXFP4; `changes` are by the last names of tensors, None for none."""
    model = random_model("gpt-oss")
    model.save_pretrained(directory)
    stored, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"] = blocks
        stored[f"{name}_scales"] = torch.randint(119, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
    for name in list(stored):
        for end, tensor in changes.items():
            if name.endswith(end):
                stored.pop(name)
                stored |= {} if tensor is None else {name: tensor.clone()}
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_experts_in_mxfp4_are_those_that_transformers_reads(tmp_path: Path) -> None:
    directory = microscaled(tmp_path)
    config = read_model_config(directory)
    for dtype in (torch.float32, torch.bfloat16):
        found = dict(checkpoint_names(config, load_weights(directory, config, dtype)))
        stored = load_file(directory / "model.safetensors")
        for name in ("model.layers.2.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
            expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=dtype)
            assert torch.equal(found[name], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": None}, r"down_proj_blocks is stored without its scales; download it again"),
        ({"down_proj_scales": torch.zeros(5, 96, 1, dtype=torch.uint8)}, r"_scales is U8 of shape \[5, 96, 1\]; \[5"),
        ({"down_proj_blocks": torch.zeros(5, 96, 2, 16)}, r"down_proj_blocks is F32 .*; U8 is expected"),
        ({"down_proj_blocks": torch.zeros(5, 96, dtype=torch.uint8)}, r"_blocks is U8 .*; four dimensions"),
        ({"down_proj_blocks": None}, r"holds model\.layers\.0\.mlp\.experts\.down_proj_scales|lacks .*down_proj"),
        ({"down_proj_scales": torch.full((5, 96, 2), 255, dtype=torch.uint8)}, r"down_proj holds numbers from"),
    ],
)
def test_damaged_experts_in_mxfp4_are_refused(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    directory = microscaled(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_weights(directory, read_model_config(directory), torch.float32)
