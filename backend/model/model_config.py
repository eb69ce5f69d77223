"""Reads and checks config.json and generation_config.json of a decoder-only checkpoint.

The keys are those of transformers, old (`rope_theta`, `rope_scaling`, `torch_dtype`) and new (`rope_parameters`,
`dtype`). A key that would change the arithmetic and that the decoder does not implement is refused, never skipped.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.errors import InvalidRequest, ModelLoadError
from backend.json_file import MAX_COUNT, MAX_LAYERS, JsonFile
from backend.model.shards import Shards
from backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The stretching of rotary frequencies for longer contexts; `decoder` has the formulas and their sources."""

    kind: str  # "linear", "llama3", "yarn" or "divided"
    factor: float
    original_max_position: int  # context length before stretching (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # on cos and sin (yarn)
    divisors: tuple[float, ...] = ()  # of each pair's frequency (divided)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Feed-forward networks, of which each token uses the few that a router gives the most weight."""

    count: int  # in each layer
    per_token: int
    normalises: bool  # True if the weights of a token's experts add up to 1
    clamp: tuple[float, float] | None = None  # the slope and the limit of clamped gates (gpt-oss), with biases


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder: everything that `weights` and `decoder` need to build it."""

    architecture: str  # a name in `_FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward network, or of each expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the longest context that the checkpoint claims, after rope scaling
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int | None
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on o (Llama with attention_bias)
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    torch_dtype: str  # as stored: "float32", "float16", "bfloat16"; float32 where neither file nor weights tell
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    full_attention_layers: frozenset[int] = frozenset()  # layers that ignore the sliding window
    dtype_said_by: Literal["config", "weights", "nothing"] = "config"
    experts: ExpertsConfig | None = None  # None: one feed-forward network a layer
    gelu: bool = False  # gates are GELU (by tanh), not SiLU
    branch_norms: bool = False  # results of attention and feed-forward are normed; norms are stored less 1 (Gemma)
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    local_rope_theta: float | None = None  # of layers with a window, unscaled; None: as the others
    sinks: bool = False  # each head's scores have one more, which no value belongs to

    def window(self, layer: int) -> int | None:
        """Return the number of positions back, itself included, that a query of `layer` sees; None: all of them."""
        return None if layer in self.full_attention_layers else self.sliding_window


@dataclass(frozen=True, slots=True)
class _DecoderFamily:
    """The facts that an architecture fixes without naming them in config.json."""

    model_type: str  # its other name
    always_qkv_bias: bool = False
    bias_keys: bool = False  # attention_bias (q, k, v and o) is read
    mlp_bias_key: bool = False
    qk_norm: bool = False
    windowed: bool = False  # sliding_window is read
    window_switch: bool = False  # ... only under use_sliding_window
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    experts: bool = False
    intermediate_key: str = "intermediate_size"
    tied: bool = False  # where tie_word_embeddings is not mentioned
    window_every: int = 0  # without layer_types, every `window_every`-th layer has none
    window: int = 4096  # where sliding_window is not mentioned; null means no window
    rope_theta: float = 10_000.0  # where none is mentioned
    gpt_oss: bool = False  # sinks, clamped experts and router with biases
    gemma: bool = False  # two rotations, norms of branches, scales of embeddings and scores, GELU
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # keys beside `_NEUTRAL`


_FAMILIES = {
    "LlamaForCausalLM": _DecoderFamily("llama", bias_keys=True, mlp_bias_key=True),
    "MistralForCausalLM": _DecoderFamily("mistral", windowed=True),
    "Qwen2ForCausalLM": _DecoderFamily("qwen2", always_qkv_bias=True, windowed=True, window_switch=True),
    "Qwen3ForCausalLM": _DecoderFamily(
        "qwen3", bias_keys=True, qk_norm=True, windowed=True, window_switch=True, head_dim=128
    ),
    "Gemma3ForCausalLM": _DecoderFamily(
        "gemma3_text",
        bias_keys=True,
        qk_norm=True,
        windowed=True,
        window_every=6,
        head_dim=256,
        rope_theta=1_000_000.0,
        tied=True,
        gemma=True,
        neutral=dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu_pytorch_tanh",)),
    ),
    "GptOssForCausalLM": _DecoderFamily(
        "gpt_oss",
        bias_keys=True,
        windowed=True,
        window=128,
        window_every=2,
        head_dim=64,
        rope_theta=150_000.0,
        experts=True,
        gpt_oss=True,
    ),
    "Qwen3MoeForCausalLM": _DecoderFamily(
        "qwen3_moe",
        bias_keys=True,
        qk_norm=True,
        experts=True,
        intermediate_key="moe_intermediate_size",
        neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "use_sliding_window": (False,)},
    ),
}

_LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys that change the arithmetic, and the values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
}

_EXPERT_KEYS = ("num_experts", "num_local_experts")
MAX_EXPERTS = 2**17  # of all layers; each has three tensors

_DTYPES = ("float32", "float16", "bfloat16")


def read_model_config(directory: Path) -> ModelConfig:
    """Return the shape of the checkpoint in `directory`. `ModelLoadError` names file, key and what is supported."""
    file = JsonFile.read(directory / "config.json")
    architecture = _architecture(file)
    family = _FAMILIES[architecture]
    if file.get("model_type") not in (None, family.model_type):
        raise file.wrong("model_type", f"{architecture} is a {family.model_type!r}; correct whichever is wrong")
    neutral = {**_NEUTRAL, **({} if family.experts else dict.fromkeys(_EXPERT_KEYS, (0,))), **family.neutral}
    for key, values in neutral.items():
        _refuse_unless_neutral(file, key, values)
    heads, layers = file.integer("num_attention_heads"), file.integer("num_hidden_layers", below=MAX_LAYERS)
    dtype, said_by = _dtype(directory, file)
    attention_bias = family.bias_keys and file.flag("attention_bias", default=family.gpt_oss)
    rope, local_theta = _gemma_rope(file) if family.gemma else (_rope(file), None)
    max_position = file.integer("max_position_embeddings")
    if family.gpt_oss and rope is None:
        raise file.wrong("rope_scaling", "an object is expected, as in published checkpoints")
    scaling = _rope_scaling(file, rope, max_position)
    window, full_layers = _sliding_window(file, family, layers)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        intermediate_size=file.integer(family.intermediate_key),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.integer("num_key_value_heads", default=heads),
        head_dim=_head_dim(file, family, heads),
        max_position=max_position if family.gemma else _stretched(max_position, scaling),
        rms_norm_eps=file.number("rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(file, rope, "rope_theta", family.rope_theta),
        rope_scaling=scaling,
        sliding_window=window,
        attention_bias=family.always_qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias_key and file.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=file.flag("tie_word_embeddings", default=family.tied),
        torch_dtype=dtype,
        bos_token_id=None if file.get("bos_token_id") is None else file.integer("bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(directory, file),
        full_attention_layers=full_layers,
        dtype_said_by=said_by,
        experts=_experts(file, family, layers) if family.experts else None,
        gelu=family.gemma,
        branch_norms=family.gemma,
        embedding_scale=file.integer("hidden_size") ** 0.5 if family.gemma else 1.0,
        attention_scale=file.integer("query_pre_attn_scalar", default=256) ** -0.5 if family.gemma else None,
        local_rope_theta=local_theta,
        sinks=family.gpt_oss,
    )
    _check_whole(file, config)
    return config


def _architecture(file: JsonFile) -> str:
    """Return the family's causal model; its base model saved by itself, `LlamaModel`, has the same decoder."""
    said = file.get("architectures")
    names = said if isinstance(said, list) else []
    known = [family for family in _FAMILIES if family in names or _base_of(family) in names]
    if len(known) != 1:
        raise file.wrong("architectures", f"one of {', '.join(_FAMILIES)} is supported")
    return known[0]


def _base_of(family: str) -> str:
    return family.removesuffix("ForCausalLM") + "Model"


def _refuse_unless_neutral(file: JsonFile, key: str, neutral: tuple[object, ...]) -> None:
    value = file.get(key)
    if value is not None and value not in neutral:
        supported = " or ".join(repr(value) for value in neutral) or "only a model without it"
        raise file.wrong(key, f"{supported} is supported")


def _head_dim(file: JsonFile, family: _DecoderFamily, heads: int) -> int:
    hidden = file.integer("hidden_size")
    default = family.head_dim or hidden // heads
    if file.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise file.wrong("num_attention_heads", f"without head_dim it must divide hidden_size {hidden}")
    head_dim = file.integer("head_dim", default=default)
    if head_dim % 2:
        raise ModelLoadError(f"{file.path}: head_dim is {head_dim}; rotary embedding needs an even one")
    return head_dim


def _experts(file: JsonFile, family: _DecoderFamily, layers: int) -> ExpertsConfig:
    key, *others = [key for key in _EXPERT_KEYS if file.get(key) is not None] or _EXPERT_KEYS
    count = file.integer(key, below=MAX_EXPERTS // layers + 1)
    if others and file.get(others[0]) not in (None, count):
        raise file.wrong(others[0], f"{key} says {count}: correct whichever is wrong")
    per_token = file.integer("num_experts_per_tok")
    if per_token > count:
        raise file.wrong("num_experts_per_tok", f"at most the {count} of {key} are expected")
    if not family.gpt_oss:
        return ExpertsConfig(count, per_token, file.flag("norm_topk_prob", default=False))
    clamp = file.number("swiglu_alpha", default=1.702), file.number("swiglu_limit", default=7.0)
    return ExpertsConfig(count, per_token, normalises=True, clamp=clamp)


def _check_whole(file: JsonFile, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise file.wrong("num_key_value_heads", f"it must divide num_attention_heads {config.num_heads}")
    beyond = [token for token in config.eos_token_ids if token >= config.vocab_size]
    if beyond:
        raise ModelLoadError(
            f"{file.path}: eos_token_id {beyond[0]} lies outside the vocabulary of {config.vocab_size} tokens; "
            f"correct it here or in generation_config.json"
        )
    scaling, pairs = config.rope_scaling, config.head_dim // 2
    if scaling is not None and scaling.kind == "divided" and len(scaling.divisors) != pairs:
        raise file.wrong("rope_scaling", f"a divisor for each of {pairs} pairs is expected")
    if config.max_position >= MAX_COUNT:
        raise ModelLoadError(
            f"{file.path}: its rope scaling makes a context of {config.max_position:.3g} positions; fewer than "
            f"{MAX_COUNT:,} are expected: correct its factor"
        )


def _dtype(directory: Path, file: JsonFile) -> tuple[str, Literal["config", "weights", "nothing"]]:
    """Return the checkpoint's type and its source: config.json, else the headers of the weights in the directory."""
    key = "dtype" if file.get("dtype") is not None else "torch_dtype"
    value = file.get(key)
    if value is None:
        stored = _stored_dtype(directory)
        return (stored, "weights") if stored else ("float32", "nothing")
    if value not in _DTYPES:
        raise file.wrong(key, f"one of {', '.join(_DTYPES)} is supported")
    return str(value), "config"


def _stored_dtype(directory: Path) -> str | None:
    """Return the weights' type; None if they are missing or cannot be read, which loading them will report."""
    with suppress(ModelLoadError):
        return Shards(directory).dtype
    return None


def _eos_token_ids(directory: Path, config: JsonFile) -> tuple[int, ...]:
    """Return the end tokens: generation_config.json's where it names any, else config.json's."""
    path = directory / "generation_config.json"
    generation = JsonFile.read(path) if path.exists() else config
    file = generation if generation.get("eos_token_id") is not None else config
    value = file.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise file.wrong("eos_token_id", "a token id or a list of them is expected")
    return tuple(ids)


def _sliding_window(file: JsonFile, family: _DecoderFamily, layers: int) -> tuple[int | None, frozenset[int]]:
    """Return the window, and the layers that see past it."""
    switched_on = not family.window_switch or file.flag("use_sliding_window", default=False)
    denied = file.mentions("sliding_window") and file.get("sliding_window") is None
    if denied and family.gemma:  # its layers with a window turn otherwise
        raise file.wrong("sliding_window", "an integer is expected")
    if not family.windowed or not switched_on or denied:
        return None, frozenset()
    window = file.integer("sliding_window", default=family.window)
    types = file.get("layer_types")
    if types is None:
        if family.window_every:
            every = file.integer("sliding_window_pattern", default=family.window_every)
            return window, frozenset(range(every - 1, layers, every))
        first = file.integer("max_window_layers", default=28, minimum=0) if family.window_switch else 0
        return window, frozenset(range(min(first, layers)))
    if not isinstance(types, list) or len(types) != layers or any(kind not in _LAYER_TYPES for kind in types):
        raise file.wrong("layer_types", f'{layers} times "full_attention" or "sliding_attention" is supported')
    return window, frozenset(layer for layer, kind in enumerate(types) if kind == "full_attention")


def _rope_theta(file: JsonFile, rope: JsonFile | None, key: str, default: float) -> float:
    """Return the base of the rope object, or the file's under `key`."""
    if rope is not None and rope.get("rope_theta") is not None:
        file, key = rope, "rope_theta"
    theta = file.number(key, default=default)
    if theta <= 1:
        raise file.wrong(key, "a base above 1 is expected")
    return theta


def _gemma_rope(file: JsonFile) -> tuple[JsonFile | None, float]:
    """Return the rope object of layers without a window, and the base of the others."""
    both = file.nested("rope_parameters")
    if both is None or all(both.get(kind) is None for kind in _LAYER_TYPES):
        of_all, local = _rope(file), None
    else:
        of_all, local = (both.nested(kind) for kind in _LAYER_TYPES)
    if local is not None and local.get("rope_type") not in (None, "default"):
        raise local.wrong("rope_type", "default is supported")
    return of_all, _rope_theta(file, local, "rope_local_base_freq", 10_000.0)


def _rope(file: JsonFile) -> JsonFile | None:
    """Return the rope object under its old or its new name; None if there is neither."""
    old, new = file.nested("rope_scaling"), file.nested("rope_parameters")
    if old is not None and new is not None and file.get("rope_scaling") != file.get("rope_parameters"):
        raise file.wrong("rope_scaling", "rope_parameters says otherwise: put all that is meant into one of them")
    return new if old is None else old


def _rope_scaling(file: JsonFile, rope: JsonFile | None, max_position: int) -> RopeScaling | None:
    """Return the scaling of the rope object, under either of its names.

    "dynamic" only begins beyond max_position_embeddings, where no request is admitted: it equals no scaling.
    """
    if rope is None:
        return None
    for refused, neutral in {"partial_rotary_factor": (1,), "full_attention": (), "sliding_attention": ()}.items():
        _refuse_unless_neutral(rope, refused, neutral)
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(key) or "default"
    if kind in ("default", "dynamic"):
        return None
    original = _original_max_position(file, rope, max_position)
    if kind == "linear":
        return RopeScaling(kind, rope.number("factor"), original)
    if kind == "llama3":
        return _llama3(rope, original)
    if kind == "yarn":
        return _yarn(rope, original, max_position)
    if kind == "divided":
        return RopeScaling(kind, 1.0, original, divisors=_divisors(rope))
    raise rope.wrong(key, "default, linear, dynamic, llama3 or yarn is supported")


def _divisors(rope: JsonFile) -> tuple[float, ...]:
    """Return the divisors of frequencies that a GGUF file holds instead of a formula's numbers."""
    divisors = rope.get("divisors")
    if not isinstance(divisors, list) or not all(isinstance(one, float) and 0 < one < MAX_COUNT for one in divisors):
        raise rope.wrong("divisors", "a list of numbers above 0 is expected")
    return tuple(divisors)


def _original_max_position(file: JsonFile, rope: JsonFile, max_position: int) -> int:
    key = "original_max_position_embeddings"
    return file.integer(key) if file.get(key) is not None else rope.integer(key, default=max_position)


def _llama3(rope: JsonFile, original: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.wrong("high_freq_factor", f"it must be above low_freq_factor {low}")
    return RopeScaling("llama3", rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: JsonFile, original: int, max_position: int) -> RopeScaling:
    factor = rope.number("factor", default=max_position / original)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=not rope.mentions("truncate")),  # null is false, as in transformers
        attention_factor=rope.number("attention_factor", default=_yarn_attention_factor(rope, factor)),
    )


def _yarn_attention_factor(rope: JsonFile, factor: float) -> float:
    """Return sqrt(1 / temperature) of Peng et al. (2023), equation 22, with DeepSeek's mscale pair where given."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)


def _stretched(max_position: int, scaling: RopeScaling | None) -> int:
    """Return the context after scaling. Checkpoints of llama3 scaling, in GGUF "divided", name the stretched
    context.
    """
    if scaling is None or scaling.kind in ("llama3", "divided"):
        return max_position
    return max(max_position, int(scaling.original_max_position * scaling.factor))


_DRAWING_KEYS = ("temperature", "top_p", "top_k", "min_p")
_KEYS = ("repetition_penalty",)  # applies to greedy tokens too


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Return the model's defaults for fields of `SamplingParams`; empty where the file names none.

    `do_sample: false` makes greedy the default and overrides the other fields. Raises `ModelLoadError` for values that
    no request may have.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    file = JsonFile.read(path)
    greedy = file.get("do_sample") is False
    keys = _KEYS if greedy else _DRAWING_KEYS + _KEYS
    defaults = {key: value for key in keys if (value := file.get(key)) is not None}
    if greedy:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise file.wrong(error.param, f"{error}; correct it, or remove the key") from error
    return defaults
