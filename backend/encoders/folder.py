"""A folder of sentence-transformers, or of transformers alone, read for the steps from its texts to vectors or scores.

An unsupported setting is refused by name: a vector that is slightly wrong looks like any other.
"""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from backend.errors import ModelLoadError
from backend.json_file import JsonFile, read_json

Kind = Literal["embed", "score"]

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""The order in which sentence-transformers joins several, from flags named pooling_mode_cls_token and so on."""

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A product that changes a pooled vector; its weights lie in a folder of their own."""

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    """The settings in the files beside a transformer's own."""

    directory: Path  # of the transformer's config.json, weights and tokenizer
    config: JsonFile  # config.json
    architecture: str
    kind: Kind
    poolings: tuple[str, ...]  # joined if there are several; none for scores
    pooled: tuple[DenseLayer | Literal["normalize"], ...]  # the changes of a pooled vector, in order
    max_seq_length: int | None  # of an input, special tokens included
    lower_case: bool
    default_prompt: str  # precedes each text
    score_activation: str  # from a logit to a score


def read_folder(path: Path) -> EncoderFolder:
    """Read a folder. Raises `ModelLoadError` naming file, key and what is supported."""
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    directory = modules[0][1] if modules else path
    config = JsonFile.read(directory / "config.json")
    if config.get("auto_map") is not None:
        raise config.wrong("auto_map", "only a model without code of its own is supported")
    architecture = _architecture(config)
    kind: Kind = "score" if architecture.endswith("ForSequenceClassification") and "Pooling" not in kinds else "embed"
    if modules:
        _check_order(path, kinds, kind)
    sentence = _sentence_config(directory)
    said = _optional(path / "config_sentence_transformers.json")
    poolings = [
        _poolings(JsonFile.read(folder / "config.json"), config) for name, folder in modules if name == "Pooling"
    ]
    default_pooling = "lasttoken" if architecture.endswith("ForCausalLM") else "mean"
    limit = sentence.get("max_seq_length")
    return EncoderFolder(
        directory=directory,
        config=config,
        architecture=architecture,
        kind=kind,
        poolings=() if kind == "score" else poolings[0] if poolings else (default_pooling,),
        pooled=tuple(
            "normalize" if name == "Normalize" else _dense(folder)
            for name, folder in modules
            if name in ("Dense", "Normalize")
        ),
        max_seq_length=None if limit is None else sentence.integer("max_seq_length"),
        lower_case=sentence.flag("do_lower_case", default=False),
        default_prompt=_default_prompt(said),
        score_activation=_score_activation(config, said),
    )


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Return the last word of each module's type, and its folder; nothing without modules.json."""
    file = path / "modules.json"
    if not file.is_file():
        return []
    entries = read_json(file)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ModelLoadError(f"{file} must hold a list of objects, one for each module")
    found = []
    for index, entry in enumerate(entries):
        module = JsonFile(file, entry, f"[{index}].")
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _MODULES:
            raise module.wrong("type", f"one of {', '.join(_MODULES)} is supported")
        folder = module.get("path")
        if not isinstance(folder, str) or PurePath(folder).is_absolute() or ".." in PurePath(folder).parts:
            raise module.wrong("path", "a folder below the model's is expected")
        found.append((kind, path / folder))
    return found


def _check_order(path: Path, kinds: list[str], kind: Kind) -> None:
    first = ["Transformer"] if kind == "score" else ["Transformer", "Pooling"]
    rest = kinds[len(first) :]
    if kinds[: len(first)] != first or set(rest) & set(first) or (kind == "score" and rest):
        expected = "Transformer alone" if kind == "score" else "Transformer, Pooling and then any Dense and Normalize"
        raise ModelLoadError(f"{path / 'modules.json'} lists {', '.join(kinds)}; {expected} is supported")


def _architecture(config: JsonFile) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.wrong("architectures", "a list of one name is expected")
    return names[0]


def _sentence_config(directory: Path) -> JsonFile:
    """Return sentence_bert_config.json, which in old folders has another model's name."""
    paths = sorted(directory.glob("sentence_*_config.json"))
    return JsonFile.read(paths[0]) if paths else JsonFile(directory / "sentence_bert_config.json", {})


def _optional(path: Path) -> JsonFile:
    return JsonFile.read(path) if path.is_file() else JsonFile(path, {})


def _poolings(file: JsonFile, config: JsonFile) -> tuple[str, ...]:
    for key in ("word_embedding_dimension", "embedding_dimension"):
        hidden = config.get("hidden_size") or config.get("dim")  # DistilBERT's key
        if file.get(key) not in (None, hidden):
            raise file.wrong(key, f"the model's {hidden} is expected")
    if not file.flag("include_prompt", default=True):
        raise file.wrong("include_prompt", "only true is supported: prompts are pooled with their texts")
    said = file.get("pooling_mode")
    if said is None:
        return tuple(name for key, name in _FLAGS.items() if file.flag(key, default=False)) or ("mean",)
    names = said if isinstance(said, list) else [said]
    if not names or any(name not in POOLINGS for name in names):
        raise file.wrong("pooling_mode", f"one of {', '.join(POOLINGS)}, or a list of them, is supported")
    return tuple(names)


def _dense(directory: Path) -> DenseLayer:
    file = JsonFile.read(directory / "config.json")
    for key, value in {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}.items():
        if file.get(key) not in (None, value):
            raise file.wrong(key, f"{value!r} is supported")
    if file.flag("use_residual", default=False):
        raise file.wrong("use_residual", "only false is supported")
    return DenseLayer(
        directory,
        file.integer("in_features"),
        file.integer("out_features"),
        file.flag("bias", default=True),
        _activation(file, "activation_function", "tanh"),
    )


def _activation(file: JsonFile, key: str, default: str) -> str:
    """Return an activation that is named as torch's class: "torch.nn.modules.activation.Tanh"."""
    said = file.get(key)
    if said is None:
        return default
    name = str(said).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise file.wrong(key, f"one of {', '.join(_ACTIVATIONS)} of torch.nn is supported")
    return _ACTIVATIONS[name]


def _score_activation(config: JsonFile, said: JsonFile) -> str:
    """Return the function that sentence-transformers' CrossEncoder applies to a logit: the saved one, else a
    sigmoid.
    """
    nested = config.nested("sentence_transformers")
    saved = _activation(config, "sbert_ce_default_activation_function", "sigmoid")
    saved = saved if nested is None else _activation(nested, "activation_fn", saved)
    return _activation(said, "activation_fn", saved)


def _default_prompt(file: JsonFile) -> str:
    prompts = file.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise file.wrong("prompts", "an object from names to texts is expected")
    default = file.get("default_prompt_name")
    if default is None:
        return ""
    if default not in list(prompts):
        raise file.wrong("default_prompt_name", f"one of the prompts is expected: {', '.join(prompts) or 'none'}")
    return prompts[default] or ""
