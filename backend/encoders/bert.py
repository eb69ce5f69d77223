"""BERT and its kin: bidirectional encoders with learned positions, and their heads that score a pair of texts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from backend.encoders.folder import EncoderFolder
from backend.encoders.packed import PackedInputs
from backend.encoders.pooling import ACTIVATIONS
from backend.errors import ModelLoadError
from backend.json_file import MAX_LAYERS, JsonFile
from backend.kernels.ops import Linear, Ops
from backend.model.weights import Checkpoint, check_tensors, copy_checked

_HIDDEN_ACTS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_BODY = ("embeddings.", "encoder.", "transformer.")
_NEUTRAL = {
    "quantization_config": None,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}


@dataclass(frozen=True, slots=True)
class _EncoderFamily:
    """An architecture's names of tensors and settings, and its differences from BERT."""

    prefix: str = "bert."
    layers: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    head: tuple[str, str, str] = ("pooler.dense", "tanh", "classifier")  # a product, its activation, the last product
    token_types: bool = True
    second_type: bool = True  # tokens of the second of two texts are of type 1
    after_padding: bool = False  # positions begin behind the padding token's id, and skip that token
    relative: bool = False  # a bias on attention, by distance
    config_keys: tuple[str, ...] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
    )


_BERT = _EncoderFamily()
_ROBERTA = _EncoderFamily(
    prefix="roberta.",
    head=("classifier.dense", "tanh", "classifier.out_proj"),
    second_type=False,
    after_padding=True,
)
_DISTILBERT = _EncoderFamily(
    prefix="distilbert.",
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
    head=("pre_classifier", "relu", "classifier"),
    token_types=False,
    config_keys=("dim", "hidden_dim", "n_layers", "n_heads", "activation"),
)
_MPNET = _EncoderFamily(
    prefix="mpnet.",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    head=("classifier.dense", "tanh", "classifier.out_proj"),
    token_types=False,
    after_padding=True,
    relative=True,
)
FAMILIES = {"Bert": _BERT, "Roberta": _ROBERTA, "XLMRoberta": _ROBERTA, "DistilBert": _DISTILBERT, "MPNet": _MPNET}
_NEAREST = 128  # MPNet's farthest distance with a bias of its own


def family_of(architecture: str) -> _EncoderFamily | None:
    """Return the family of BertModel, BertForSequenceClassification and their like; None for another architecture."""
    for name, family in FAMILIES.items():
        if architecture in (f"{name}Model", f"{name}ForMaskedLM", f"{name}ForSequenceClassification"):
            return family
    return None


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The shape of a bidirectional encoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # rows of the table
    num_token_types: int  # 0: tokens have no types
    num_buckets: int  # of distances; 0: attention has no bias
    first_position: int
    layer_norm_eps: float
    activation: str
    scores: bool

    @property
    def max_tokens(self) -> int:
        return self.num_positions - self.first_position


def read_bert_config(folder: EncoderFolder, family: _EncoderFamily) -> BertConfig:
    """Return the shape in config.json. Raises `ModelLoadError` for a setting that changes the arithmetic and is not
    supported.
    """
    file = folder.config
    for key, neutral in _NEUTRAL.items():
        if file.get(key) not in (None, neutral):
            raise file.wrong(key, f"only {'a model without it' if neutral is None else repr(neutral)} is supported")
    hidden, intermediate, layers, heads, act = family.config_keys
    config = BertConfig(
        architecture=folder.architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer(hidden),
        intermediate_size=file.integer(intermediate),
        num_layers=file.integer(layers, below=MAX_LAYERS),
        num_heads=file.integer(heads),
        num_positions=file.integer("max_position_embeddings"),
        num_token_types=file.integer("type_vocab_size", default=2) if family.token_types else 0,
        num_buckets=file.integer("relative_attention_num_buckets", default=32) if family.relative else 0,
        first_position=file.integer("pad_token_id", default=1, minimum=0) + 1 if family.after_padding else 0,
        layer_norm_eps=file.number("layer_norm_eps", default=1e-12),
        activation=_hidden_act(file, act),
        scores=folder.kind == "score",
    )
    if config.hidden_size % config.num_heads:
        raise file.wrong(heads, f"it must divide {hidden} {config.hidden_size}")
    if config.max_tokens < 1:
        raise file.wrong("max_position_embeddings", f"more than {config.first_position} is expected")
    if config.scores:
        _check_one_label(file)
    return config


def _hidden_act(file: JsonFile, key: str) -> str:
    name = file.get(key) or "gelu"
    if not isinstance(name, str) or name not in _HIDDEN_ACTS:
        raise file.wrong(key, f"one of {', '.join(_HIDDEN_ACTS)} is supported")
    return _HIDDEN_ACTS[name]


def _check_one_label(file: JsonFile) -> None:
    labels = file.get("id2label")
    count = len(labels) if isinstance(labels, dict) else file.integer("num_labels", default=2)
    if count != 1:
        key = "id2label" if isinstance(labels, dict) else "num_labels"
        raise file.wrong(key, f"one label is supported, a score, and here are {count}")


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor  # [hidden]
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    qkv: Tensor  # [3 * hidden, hidden], rows of query, then key, then value
    qkv_bias: Tensor
    output: Tensor
    output_bias: Tensor
    attention_norm: _Norm
    up: Tensor  # [intermediate, hidden]
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    norm: _Norm


@dataclass(frozen=True, slots=True)
class _PreparedLayer:
    qkv: Linear
    output: Linear
    attention_norm: _Norm
    up: Linear
    down: Linear
    norm: _Norm


class BertWeights:
    """The weights of an encoder: uninitialised memory, by the parts' names in a checkpoint."""

    def __init__(self, config: BertConfig, family: _EncoderFamily, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, inner = config.hidden_size, config.intermediate_size
        self._family = family
        self.words = empty(config.vocab_size, hidden)
        self.positions = empty(config.num_positions, hidden)
        self.token_types = empty(config.num_token_types, hidden)
        self.biases = empty(config.num_buckets, config.num_heads)
        self.norm = _Norm(empty(hidden), empty(hidden))
        self.layers = [
            _LayerWeights(
                qkv=empty(3 * hidden, hidden),
                qkv_bias=empty(3 * hidden),
                output=empty(hidden, hidden),
                output_bias=empty(hidden),
                attention_norm=_Norm(empty(hidden), empty(hidden)),
                up=empty(inner, hidden),
                up_bias=empty(inner),
                down=empty(hidden, inner),
                down_bias=empty(hidden),
                norm=_Norm(empty(hidden), empty(hidden)),
            )
            for _ in range(config.num_layers)
        ]
        self.head: list[Tensor] = []  # two products with their biases
        if config.scores:
            shapes = [(hidden, hidden), (hidden,), (1, hidden), (1,)]
            self.head = [empty(*shape, dtype=torch.float32) for shape in shapes]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name, without the model's prefix, with the memory that it fills."""
        family = self._family
        yield "embeddings.word_embeddings.weight", self.words
        yield "embeddings.position_embeddings.weight", self.positions
        if len(self.token_types):
            yield "embeddings.token_type_embeddings.weight", self.token_types
        if len(self.biases):
            yield "encoder.relative_attention_bias.weight", self.biases
        yield from _named_norm("embeddings.LayerNorm", self.norm)
        for index, layer in enumerate(self.layers):
            prefix = f"{family.layers}.{index}"
            for name, part in zip((family.query, family.key, family.value), range(3), strict=True):
                yield f"{prefix}.{name}.weight", layer.qkv.chunk(3)[part]
                yield f"{prefix}.{name}.bias", layer.qkv_bias.chunk(3)[part]
            for name, weight, bias in (
                (family.output, layer.output, layer.output_bias),
                (family.up, layer.up, layer.up_bias),
                (family.down, layer.down, layer.down_bias),
            ):
                yield f"{prefix}.{name}.weight", weight
                yield f"{prefix}.{name}.bias", bias
            yield from _named_norm(f"{prefix}.{family.attention_norm}", layer.attention_norm)
            yield from _named_norm(f"{prefix}.{family.norm}", layer.norm)
        if self.head:
            first, _, last = family.head
            names = (f"{first}.weight", f"{first}.bias", f"{last}.weight", f"{last}.bias")
            yield from zip(names, self.head, strict=True)


def _named_norm(name: str, norm: _Norm) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", norm.weight
    yield f"{name}.bias", norm.bias


def load_bert_weights(
    folder: EncoderFolder, config: BertConfig, family: _EncoderFamily, dtype: torch.dtype, device: torch.device
) -> BertWeights:
    """Read the safetensors of a folder, whose names may have the model's prefix.

    Tensors of unused heads are not read. All faults but damaged numbers are found before anything is allocated.
    """
    checkpoint = Checkpoint(folder.directory)
    names = {full: _plain(info.stored_as, family) for full, info in checkpoint.infos.items()}
    expected = dict(BertWeights(config, family, dtype, torch.device("meta")).named())
    used = {full: name for full, name in names.items() if name in expected or name.startswith(_BODY)}
    used = {full: name for full, name in used.items() if not name.endswith(".position_ids")}  # counted, not learned
    infos = {name: checkpoint.infos[full] for full, name in used.items()}
    if len(infos) < len(used):
        name = next(name for name, count in Counter(used.values()).items() if count > 1)
        raise ModelLoadError(
            f"{checkpoint.source} holds {name} twice, once with the prefix {family.prefix}: remove one"
        )
    check_tensors(checkpoint.source, infos, expected, config.architecture, {})
    weights = BertWeights(config, family, dtype, device)
    targets = dict(weights.named())
    for full, tensor in checkpoint.tensors():
        if full in used:
            copy_checked(checkpoint.infos[full], used[full], tensor, targets[used[full]])
    return weights


def _plain(stored_as: str, family: _EncoderFamily) -> str:
    """Return a tensor's name without the model's prefix, and without TensorFlow's names of norms' weights."""
    name = stored_as.removeprefix(family.prefix)
    for old, new in {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


class Bert:
    """A bidirectional encoder. It takes `weights` over and empties them layer by layer.

    `separator`: the id of the token behind the first of two texts, if tokens of the second have a type of their own.
    """

    def __init__(
        self, config: BertConfig, family: _EncoderFamily, weights: BertWeights, ops: Ops, separator: int | None
    ) -> None:
        self.config = config
        self._words, self._positions, self._token_types = weights.words, weights.positions, weights.token_types
        self._biases, self._norm = weights.biases, weights.norm
        self._separator = separator
        self._activation = ACTIVATIONS[config.activation]
        self._layers = [_prepare(weights.layers.pop(0), ops) for _ in range(config.num_layers)]
        self._head: tuple[Linear, Linear] | None = None
        if weights.head:
            first, first_bias, last, last_bias = weights.head
            self._head = ops.linear(first, first_bias), ops.linear(last, last_bias)
        self._head_activation = ACTIVATIONS[family.head[1]]

    def forward(self, packed: PackedInputs) -> Tensor:
        """Return the last hidden states [T, hidden]."""
        config, tokens = self.config, len(packed.token_ids)
        x = self._normed(self._embed(packed), self._norm)
        biases = [self._bias(length) for _, length in packed.groups] if config.num_buckets else None
        for layer in self._layers:
            query, key, value = layer.qkv(x).view(tokens, 3, config.num_heads, -1).unbind(1)
            attended = packed.attend(query, key, value, causal=False, biases=biases)
            x = self._normed(layer.output(attended.flatten(1)) + x, layer.attention_norm)
            x = self._normed(layer.down(self._activation(layer.up(x))) + x, layer.norm)
        return x

    def logits(self, first_tokens: Tensor) -> Tensor:
        """Return the head's logits [inputs] for hidden states [inputs, hidden] of first tokens, in float32."""
        assert self._head is not None
        first, last = self._head
        return last(self._head_activation(first(first_tokens.contiguous()))).squeeze(1)

    def _embed(self, packed: PackedInputs) -> Tensor:
        x = self._words[packed.token_ids] + self._positions[self._position_ids(packed)]
        if self.config.num_token_types:
            x += self._token_types[self._type_ids(packed)]
        return x

    def _position_ids(self, packed: PackedInputs) -> Tensor:
        first = self.config.first_position
        if not first:
            return packed.positions()
        padding = first - 1
        counted = (packed.token_ids != padding).long()
        positions = torch.cat([group.cumsum(1).flatten() for group in packed.by_length(counted)])
        return positions * counted + padding

    def _type_ids(self, packed: PackedInputs) -> Tensor:
        """Return 0 up to the first separator, and 1 behind it."""
        if self._separator is None:
            return torch.zeros_like(packed.token_ids)
        separates = (packed.token_ids == self._separator).long()
        before = torch.cat([group.cumsum(1).flatten() for group in packed.by_length(separates)]) - separates
        return before.clamp(max=1)

    def _bias(self, length: int) -> Tensor:
        """Return MPNet's bias on attention [heads, length, length]: a near distance has its own, farther ones share one
        by logarithmic range.
        """
        places = torch.arange(length, device=self._biases.device)
        distance = places.unsqueeze(0) - places.unsqueeze(1)
        half = self.config.num_buckets // 2
        exact = half // 2
        far = torch.log(distance.abs().clamp(min=1).float() / exact) / torch.log(torch.tensor(_NEAREST / exact))
        bucket = torch.where(distance.abs() < exact, distance.abs(), exact + (far * (half - exact)).long())
        bucket = bucket.clamp(max=half - 1) + half * (distance > 0)
        return self._biases[bucket].permute(2, 0, 1)

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        return functional.layer_norm(x, (x.shape[1],), norm.weight, norm.bias, self.config.layer_norm_eps)


def _prepare(weights: _LayerWeights, ops: Ops) -> _PreparedLayer:
    return _PreparedLayer(
        qkv=ops.linear(weights.qkv, weights.qkv_bias),
        output=ops.linear(weights.output, weights.output_bias),
        attention_norm=weights.attention_norm,
        up=ops.linear(weights.up, weights.up_bias),
        down=ops.linear(weights.down, weights.down_bias),
        norm=weights.norm,
    )
