"""The decoder's weights are allocated fused, then filled from a checkpoint or at random."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.errors import ModelLoadError
from backend.gguf.checkpoint import opened_gguf
from backend.gguf.quants import integers
from backend.kernels.integers import IntegerWeight, StoredWeight, Weight
from backend.model.dequantization import dequantised
from backend.model.model_config import ModelConfig
from backend.model.shards import Shards, is_gguf, opened
from backend.model.tensor_info import TensorInfo
from backend.parallel.shard import Shard, Slices, rows_per_rank


class Checkpoint(Shards):
    """A checkpoint is the shards together with their tensors."""

    def are_equal(self, name: str, other: str) -> bool:
        """Return True if two tensors hold the same numbers in the same type."""
        if self.infos[name].dtype != self.infos[other].dtype:
            return False
        one, two = (self._whole(each, self.infos[each]) for each in (name, other))
        return torch.equal(one, two)

    def tensors(
        self, part: Callable[[str], Slices] = lambda _: (), stored: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, file by file: views of the mapped file, to be copied before the next.

        If `part` returns slices for a tensor's name, only they are read. A quantised weight is dequantised as a whole,
        or comes as the bytes of its rows if its name is among the `stored`.
        """
        for path in self.paths:
            names = {info.stored_as: name for name, info in self.infos.items() if info.shard == path}
            with _opened(path) as file:
                for stored_as, name in names.items():
                    slices = part(name)
                    if name in stored:
                        yield name, file.get_rows(stored_as)
                    elif name in self.quantized:
                        whole = self._whole(name, self.infos[name])
                        yield name, whole[slices] if slices else whole
                    else:
                        yield name, file.get_slice(stored_as)[slices] if slices else file.get_tensor(stored_as)

    def _whole(self, name: str, info: TensorInfo) -> Tensor:
        weight = self.quantized.get(name)
        return _read(info) if weight is None else dequantised(weight, _read)


def _read(info: TensorInfo) -> Tensor:
    """Read a tensor as it is stored."""
    with _opened(info.shard) as file:
        tensor: Tensor = file.get_tensor(info.stored_as)
        return tensor


def _opened(path: Path) -> AbstractContextManager[Any]:
    return opened_gguf(path) if is_gguf(path) else opened(path, "pt")


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DERIVED = ".rotary_emb.inv_freq"  # in old checkpoints; derived from the config
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The parts of each product's weight, in the order of their rows."""

_CPU = torch.device("cpu")
MAX_WEIGHT = 1e6  # in absolute value; the largest of published models are norms of some hundreds


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's weights. A product's is [out_features, in_features]; absent biases and norms are None."""

    input_norm: Tensor  # [hidden]
    qkv: Weight  # [(Hq + 2 Hk) * D, hidden], rows of q, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    output: Weight  # [hidden, Hq * D]
    output_bias: Tensor | None
    attended_norm: Tensor | None  # [hidden], of what attention returns
    post_attention_norm: Tensor  # [hidden]
    sinks: Tensor | None  # [Hq]
    router: Tensor | None  # [experts, hidden]; with it, what follows has a first dimension of experts
    router_bias: Tensor | None
    gate_up: Weight  # [2 * intermediate, hidden], rows of gate, then up; of clamped experts in turns
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, intermediate]
    down_bias: Tensor | None
    fed_norm: Tensor | None  # [hidden], of what the feed-forward network returns


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a whole model. With tied embeddings `lm_head` is `embedding` itself, or its integers."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    lm_head: Weight  # [vocab, hidden]
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """The count of the weights' numbers, a tied matrix counted once."""
        whole = [self.embedding, self.final_norm] + ([] if self.is_tied else [self.lm_head])
        fused = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        return sum(tensor.numel() for tensor in whole + fused if tensor is not None)


def with_products_apart(weights: Weights, device: torch.device) -> Weights:
    """Return the weights with all but the layers' products on `device`; those go there as they are repacked."""

    def moved(layer: LayerWeights) -> LayerWeights:
        parts = {field.name: getattr(layer, field.name) for field in fields(layer) if field.name not in _FUSED}
        found = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(layer, **found)

    embedding, head = weights.embedding.to(device), weights.lm_head
    if head is weights.embedding:
        head = embedding
    elif isinstance(head, Tensor):
        head = head.to(device)
    layers = [moved(layer) for layer in weights.layers]
    return replace(weights, embedding=embedding, layers=layers, final_norm=weights.final_norm.to(device), lm_head=head)


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    progress: Callable[[int], None] = lambda _: None,
    shard: Shard | None = None,
    keeps_integers: bool = False,
) -> Weights:
    """Read the weights of `directory`, converting to `dtype`; one tensor beyond the model is in memory at a time. With
    a `shard`, only its part is read. With `keeps_integers`, the weights of products that a GGUF file has quantised, all
    parts of them, stay as they are.

    If the config ties embeddings and a head is stored as well, the head is kept only if it differs from the embedding.
    `progress` is told the bytes of each tensor read; they add up to almost `Checkpoint.num_bytes` (headers apart).
    ModelLoadError names the file, the tensor and both shapes; all faults but damaged and overflowing numbers are found
    before anything is allocated.
    """
    checkpoint = Checkpoint(directory)
    tied, stored = config.tie_word_embeddings, _HEAD in checkpoint.infos
    config = replace(config, tie_word_embeddings=tied and not stored)
    _check(checkpoint, config)
    if tied and stored:  # as in transformers
        config = replace(config, tie_word_embeddings=checkpoint.are_equal(_EMBEDDING, _HEAD))
    weights = empty_weights(config, dtype, device, shard)  # memory that is not written to is not taken
    targets = dict(checkpoint_names(config, weights, shard))
    kept = _StoredRows(checkpoint, config) if keeps_integers and shard is None else None
    names = () if kept is None else kept.names
    for name, tensor in checkpoint.tensors(lambda name: () if shard is None else shard.slices(name, config), names):
        info = checkpoint.infos[name]
        if kept is not None and name in names:
            kept.unpack[name] = partial(_unpacked, info, name, tensor)
            if name == _EMBEDDING:
                targets[name].copy_(kept.unpack[name]().dequantised())
        elif name in targets:
            shifts = config.branch_norms and name.endswith("norm.weight") and not is_gguf(info.shard)
            copy_checked(info, name, tensor.float() + 1 if shifts else tensor, targets[name])
        progress(prod(info.shape) * checkpoint.num_size(name))
    return weights if kept is None else kept.placed(weights, dtype)


class _StoredRows:
    """The rows of products' weights that stay in the blocks of a GGUF file."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._infos = checkpoint.infos
        self._head = _EMBEDDING if config.tie_word_embeddings else _HEAD
        self._fused = {
            (index, field): [f"model.layers.{index}.{part}.weight" for part in parts]
            for index in range(config.num_layers)
            for field, parts in _FUSED.items()
        }
        whole = [*self._fused.values(), [self._head]]
        self.names = {name for parts in whole if all(map(self._is_quantised, parts)) for name in parts}
        self.unpack: dict[str, Callable[[], IntegerWeight]] = {}

    def _is_quantised(self, name: str) -> bool:
        return name in self._infos and self._infos[name].block_format is not None

    def _weight(self, names: list[str], dtype: torch.dtype) -> StoredWeight:
        shapes = [self._infos[name].shape for name in names]
        shape = (sum(rows for rows, _ in shapes), shapes[0][1])
        return StoredWeight(shape, dtype, tuple(map(self.unpack.pop, names)))

    def placed(self, weights: Weights, dtype: torch.dtype) -> Weights:
        """Return the weights with the stored parts in place."""
        for (index, field), names in self._fused.items():
            if self.names.issuperset(names):
                kept: dict[str, Any] = {field: self._weight(names, dtype)}
                weights.layers[index] = replace(weights.layers[index], **kept)
        return replace(weights, lm_head=self._weight([self._head], dtype)) if self._head in self.names else weights


def _unpacked(info: TensorInfo, name: str, rows: Tensor) -> IntegerWeight:
    """Return the integers of rows in blocks. Raises `ModelLoadError` for numbers that no training ends with."""
    found = integers(str(info.block_format), rows)
    bound = found.bound()
    _check_bounds(info, name, -bound, bound)
    return found


def random_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0, device: torch.device = _CPU) -> Weights:
    """Return weights as transformers initialises them: matrices of standard deviation 0.02, norms 1, biases 0.

    A CPU draws the same numbers for every dtype; another device draws its own, in place.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, dtype, device)
    for name, target in checkpoint_names(config, weights):
        if target.dim() > 1 and not name.endswith("bias"):
            drawn = torch.empty(target.shape) if device.type == "cpu" else target
            target.copy_(drawn.normal_(std=0.02, generator=generator))
        else:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
    return weights


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard | None = None) -> Weights:
    """Return uninitialised memory of the right shapes, those of a `shard` if one is given. The matrices over the
    vocabulary then have equally many rows on each rank; spare rows of the last rank are 0.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def over_vocabulary() -> Tensor:
        if shard is None:
            return empty(config.vocab_size, config.hidden_size)
        return empty(rows_per_rank(config.vocab_size, shard.size), config.hidden_size).zero_()

    layer_config = config if shard is None else shard.part_of(config)
    embedding = over_vocabulary()
    return Weights(
        embedding=embedding,
        layers=[_empty_layer(layer_config, empty) for _ in range(config.num_layers)],
        final_norm=empty(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else over_vocabulary(),
        is_tied=config.tie_word_embeddings,
    )


def _empty_layer(config: ModelConfig, empty: Callable[..., Tensor]) -> LayerWeights:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
    experts = () if config.experts is None else (config.experts.count,)
    clamped = config.experts is not None and config.experts.clamp is not None
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(qkv_rows, hidden),
        qkv_bias=empty(qkv_rows) if config.attention_bias else None,
        q_norm=empty(head_dim) if config.qk_norm else None,
        k_norm=empty(head_dim) if config.qk_norm else None,
        output=empty(hidden, config.num_heads * head_dim),
        output_bias=empty(hidden) if config.output_bias else None,
        attended_norm=empty(hidden) if config.branch_norms else None,
        post_attention_norm=empty(hidden),
        sinks=empty(config.num_heads) if config.sinks else None,
        router=empty(*experts, hidden) if experts else None,
        router_bias=empty(*experts) if clamped else None,
        gate_up=empty(*experts, 2 * intermediate, hidden),
        gate_up_bias=empty(*experts, 2 * intermediate) if config.mlp_bias or clamped else None,
        down=empty(*experts, hidden, intermediate),
        down_bias=empty(*experts, hidden) if config.mlp_bias or clamped else None,
        fed_norm=empty(hidden) if config.branch_norms else None,
    )


def checkpoint_names(config: ModelConfig, weights: Weights, shard: Shard | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's name in a Hugging Face checkpoint, with the memory (often part of a tensor) that it fills, or
    that its part in a `shard` fills. Stored weights are left out.
    """
    rows = config.vocab_size if shard is None else len(shard.vocab)
    yield _EMBEDDING, weights.embedding[:rows]
    yield "model.norm.weight", weights.final_norm
    if not config.tie_word_embeddings and isinstance(weights.lm_head, Tensor):
        yield _HEAD, weights.lm_head[:rows]
    if shard is not None:
        config = shard.part_of(config)
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_names(config, layer):
            if target is not None:
                yield f"model.layers.{index}.{name}", target


def _layer_names(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor | None]]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"qkv": [query, key, key], "gate_up": [config.intermediate_size] * 2}
    blocks = [("qkv", "output"), ("gate_up", "down")] if layer.router is None else [("qkv", "output")]
    for products in blocks:
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            for product in products:
                fused = getattr(layer, product + suffix)
                if isinstance(fused, Tensor):
                    parts = fused.split(rows[product]) if product in rows else [fused]
                    yield from zip((f"{name}.{kind}" for name in _FUSED[product]), parts, strict=True)
    yield "self_attn.sinks", layer.sinks
    if layer.router is not None:
        yield "mlp.gate.weight" if layer.router_bias is None else "mlp.router.weight", layer.router
        yield "mlp.router.bias", layer.router_bias
        assert isinstance(layer.gate_up, Tensor) and isinstance(layer.down, Tensor)  # files of integers have none
        if layer.router_bias is not None:  # stored as [experts, inputs, outputs], of all experts together
            yield "mlp.experts.gate_up_proj", layer.gate_up.transpose(1, 2)
            yield "mlp.experts.gate_up_proj_bias", layer.gate_up_bias
            yield "mlp.experts.down_proj", layer.down.transpose(1, 2)
            yield "mlp.experts.down_proj_bias", layer.down_bias
        else:
            for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
                names = (f"mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
                yield from zip(names, (*gate_up.chunk(2), down), strict=True)
    yield "self_attn.q_norm.weight", layer.q_norm
    yield "self_attn.k_norm.weight", layer.k_norm
    yield "input_layernorm.weight", layer.input_norm
    before = "pre_feedforward" if config.branch_norms else "post_attention"
    yield f"{before}_layernorm.weight", layer.post_attention_norm
    yield "post_attention_layernorm.weight", layer.attended_norm
    yield "post_feedforward_layernorm.weight", layer.fed_norm


def _check(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse a checkpoint whose tensors are not exactly the tensors of the config."""
    expected = dict(checkpoint_names(config, empty_weights(config, torch.float32, torch.device("meta"))))
    remedies = {_HEAD: 'if the model ties them, set "tie_word_embeddings": true'}
    infos = {name: info for name, info in checkpoint.infos.items() if not name.endswith(_DERIVED) or name in expected}
    check_tensors(checkpoint.source, infos, expected, config.architecture, remedies)


def check_tensors(
    source: Path,
    infos: Mapping[str, TensorInfo],
    expected: Mapping[str, Tensor],
    architecture: str,
    remedies: Mapping[str, str],
) -> None:
    """Refuse tensors that are not exactly the expected ones, by name and shape; `remedies` are for missing names."""
    missing = sorted(expected.keys() - infos.keys())
    if missing:
        told = "".join(f"; {remedy}" for name, remedy in remedies.items() if name in missing)
        raise ModelLoadError(f"{source} lacks {_some(missing)}, which config.json calls for{told}")
    unknown = sorted(infos.keys() - expected.keys())
    if unknown:
        raise ModelLoadError(
            f"{source} holds {_some(unknown)}, which {architecture} as config.json describes it does not use; serving "
            "without would give wrong answers"
        )
    for name, target in expected.items():
        _check_tensor(name, infos[name], tuple(target.shape))


def _check_tensor(name: str, info: TensorInfo, expected: tuple[int, ...]) -> None:
    if info.dtype not in _FLOATS:
        raise ModelLoadError(
            f"{info.shard}: {name} is stored as {info.dtype}; {', '.join(_FLOATS)} are supported, and "
            "quantised weights as config.json describes them in quantization_config"
        )
    if info.shape != expected:
        raise ModelLoadError(
            f"{info.shard}: {name} has shape {list(info.shape)}, but config.json calls for {list(expected)}"
        )


def copy_checked(info: TensorInfo, name: str, stored: Tensor, target: Tensor) -> None:
    """Copy a stored tensor to its place. `ModelLoadError` if it is damaged, or the target's type cannot hold it."""
    _check_numbers(info, name, stored)
    target.copy_(stored)
    _check_overflow(info, name, stored, target)


def _check_numbers(info: TensorInfo, name: str, stored: Tensor) -> None:
    """Refuse numbers that no training ends with: a damaged file would be served as empty answers, or as nonsense."""
    if not stored.numel():
        return
    _check_bounds(info, name, *(float(bound) for bound in stored.aminmax()))  # NaN where any number is


def _check_bounds(info: TensorInfo, name: str, low: float, high: float) -> None:
    if not -MAX_WEIGHT <= low <= high <= MAX_WEIGHT:
        raise ModelLoadError(
            f"{info.shard}: {name} holds numbers from {low:g} to {high:g}, and weights lie within {MAX_WEIGHT:g}: the "
            "file is damaged, download it again"
        )


def _check_overflow(info: TensorInfo, name: str, stored: Tensor, target: Tensor) -> None:
    """Refuse values that only the stored type can hold: bfloat16 reaches 3e38, float16 65504."""
    narrower = torch.finfo(target.dtype).max < torch.finfo(stored.dtype).max
    if narrower and not bool(target.isfinite().all()):
        raise ModelLoadError(f"{info.shard}: {name} does not fit {target.dtype}; serve it as {stored.dtype}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
