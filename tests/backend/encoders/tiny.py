"""A random BERT of 160 kB with a WordPiece of single characters: an encoder for tests, without downloads."""

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from backend.encoders.bert import BertWeights, family_of, read_bert_config
from backend.encoders.folder import Kind, read_folder

MAX_TOKENS = 128
DIM = 32
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_piece() -> tokenizers.Tokenizer:
    """A token for each character of a word, unknown ones where it is not printable ASCII; lower case, as BERT's."""
    characters = sorted(set(string.printable.lower()) - set(string.whitespace))
    tokens = [*_SPECIAL_TOKENS, *characters, *(f"##{character}" for character in characters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(_SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return tokenizer


def save_tokenizer(directory: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns how many tokens there are."""
    tokenizer = word_piece()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {f"{token[1:-1].lower()}_token": token for token in _SPECIAL_TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer.get_vocab_size()


def save_modules(directory: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """Write modules.json as sentence-transformers does, with what its Pooling says."""
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for path in filter(None, paths):
        (directory / path).mkdir(exist_ok=True)
    if "Pooling" in kinds:
        (directory / paths[kinds.index("Pooling")] / "config.json").write_text(json.dumps(pooling or {}))


def save_tiny_encoder(directory: Path, kind: Kind = "embed") -> Path:
    """Write an encoder whose vectors are means of length 1, or a cross-encoder of one label."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["BertModel" if kind == "embed" else "BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": save_tokenizer(directory),
        "hidden_size": DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_TOKENS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "id2label": {"0": "LABEL_0"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    if kind == "embed":
        save_modules(directory, "Transformer", "Pooling", "Normalize", pooling={"pooling_mode_mean_tokens": True})
    folder, generator = read_folder(directory), torch.Generator().manual_seed(0)
    family = family_of(folder.architecture)
    assert family is not None
    shape = read_bert_config(folder, family)
    weights = dict(BertWeights(shape, family, torch.float32, torch.device("cpu")).named())
    for name, tensor in weights.items():
        if "Norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(std=0.3, generator=generator)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory
