"""Tiny random encoders of every family we load, made by transformers: the oracle of vectors and scores."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    MistralConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.backend.encoders.tiny import save_tokenizer, word_piece

VOCAB = word_piece().get_vocab_size()
PADDING = 3  # a token that texts may spell, and that families with positions behind it do not count
_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
_DISTILBERT = {"vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
_DECODER: dict[str, Any] = _BERT | {"num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}

BIDIRECTIONAL: dict[str, Callable[..., PreTrainedConfig]] = {
    "bert": lambda **keys: BertConfig(**_BERT, **keys),
    "bert-tanh-gelu": lambda **keys: BertConfig(**_BERT, hidden_act="gelu_new", **keys),
    "roberta": lambda **keys: RobertaConfig(**_BERT, pad_token_id=PADDING, type_vocab_size=2, **keys),
    "xlm-roberta": lambda **keys: XLMRobertaConfig(**_BERT, type_vocab_size=1, layer_norm_eps=1e-5, **keys),
    "distilbert": lambda **keys: DistilBertConfig(**_DISTILBERT, max_position_embeddings=160, **keys),
    "mpnet": lambda **keys: MPNetConfig(**_BERT, **keys),
}
DECODERS: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**_DECODER, head_dim=32, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_DECODER),
    "llama": lambda: LlamaConfig(**_DECODER),
    "mistral": lambda: MistralConfig(**_DECODER, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**_DECODER, sliding_window=20),
}
FAMILIES = BIDIRECTIONAL | DECODERS


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """The model with no neutral parameter: norms differ from 1, biases from 0, activations are of order 1."""
    model.eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def saved_model(family: str, directory: Path) -> PreTrainedModel:
    """A random model without a head, saved with a tokenizer."""
    model = randomised(AutoModel.from_config(FAMILIES[family]()))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def saved_scorer(family: str, directory: Path) -> PreTrainedModel:
    """A random cross-encoder of one label, saved with a tokenizer."""
    model = randomised(AutoModelForSequenceClassification.from_config(BIDIRECTIONAL[family](num_labels=1)))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def edit(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes them."""
    kept = (json.loads(path.read_text()) if path.exists() else {}) | values
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))


@torch.no_grad()
def hidden_states(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The last hidden states [length, hidden] of one input by itself."""
    states: torch.Tensor = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return states.float()


def inputs(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random inputs, the special tokens and padding among their tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
