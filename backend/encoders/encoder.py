"""An encoder turns token ids into vectors, or pairs of texts into scores."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from backend.encoders.bert import FAMILIES, Bert, family_of, load_bert_weights, read_bert_config
from backend.encoders.causal import CausalEncoder
from backend.encoders.folder import EncoderFolder, Kind, read_folder
from backend.encoders.packed import PackedInputs
from backend.encoders.pooling import ACTIVATIONS, Dense, normalize, pool
from backend.errors import ModelLoadError
from backend.kernels.cpu import select_ops
from backend.kernels.ops import Ops
from backend.model.model_config import ModelConfig, read_model_config
from backend.model.weights import load_weights
from backend.text.tokenizer import Tokenizer

TOKENS_PER_PASS, TOKENS_PER_CPU_PASS = 16384, 512
"""The most tokens of a forward pass of several inputs, which bounds the memory of activations. A CPU's caches hold
those of 512 tokens: 256 inputs of 16 tokens took two thirds of the time of passes of 4,096 (MiniLM, one core).
"""

_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The facts about an encoder for its callers."""

    kind: Kind
    architecture: str
    dim: int  # of a vector; 1 for scores
    max_tokens: int  # of an input, special tokens included
    vocab_size: int  # token ids are below it
    default_prompt: str  # precedes each text, as "query: "


class _Model(Protocol):
    def forward(self, packed: PackedInputs) -> Tensor: ...


class Encoder:
    """A loaded encoder. One thread at a time runs it; any may use its tokenizer.

    `tokenizer.encode(text, True)` makes an input of a text, `tokenizer.encode_inputs` of a pair to score. Neither cuts
    anything: inputs have at most `config.max_tokens`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        tokenizer: Tokenizer,
        model: _Model,
        finish: Callable[[Tensor], Tensor],
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        """`finish` turns hidden states [inputs, length, hidden], of inputs of one length, into results [inputs,
        dim].
        """
        self.config = config
        self.tokenizer = tokenizer
        self.batch_invariant = batch_invariant  # an input's results have the same bits beside any others
        self._model = model
        self._finish = finish
        self._device = device

    @torch.inference_mode()
    def run(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """Return vectors [inputs, dim], or scores [inputs], in the inputs' order: float32, on the CPU.

        The work grows with the tokens of the inputs alone: nothing is padded.
        """
        lengths = [len(tokens) for tokens in inputs]
        assert all(0 < length <= self.config.max_tokens for length in lengths), "the caller refuses or cuts the others"
        results = torch.empty((len(inputs), self.config.dim))
        for part in _passes(lengths, TOKENS_PER_CPU_PASS if self._device.type == "cpu" else TOKENS_PER_PASS):
            packed = PackedInputs([inputs[index] for index in part], self._device)
            hidden = self._model.forward(packed)
            finished = [self._finish(group) for group in packed.by_length(hidden)]
            results[part] = torch.cat(finished).cpu()
        return results.squeeze(1) if self.config.kind == "score" else results


def _passes(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the inputs of each pass by index, shortest first; `most` tokens in a pass, or one input."""
    part: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and tokens + lengths[index] > most:
            yield part
            part, tokens = [], 0
        part.append(index)
        tokens += lengths[index]
    if part:
        yield part


def load_encoder(path: Path, *, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Read an encoder's folder and place it. Raises `ModelLoadError` naming what is wrong or not supported."""
    folder = read_folder(path)
    family = family_of(folder.architecture)
    ops = select_ops(device, dtype)
    model: Bert | CausalEncoder
    approximates = False
    if family is not None:
        shape = read_bert_config(folder, family)
        tokenizer, max_tokens = _tokenizer(folder, shape.vocab_size, shape.max_tokens)
        has_types = shape.scores and shape.num_token_types > 1 and family.second_type
        separator = _separator(folder, tokenizer) if has_types else None
        model = Bert(shape, family, load_bert_weights(folder, shape, family, dtype, device), ops, separator)
        widths = (shape.hidden_size // shape.num_heads, shape.hidden_size, shape.intermediate_size)
        approximates = shape.activation == "gelu_tanh"
    else:
        decoder = replace(_decoder_config(folder), tie_word_embeddings=True)  # a head, if any, is not used
        most = min(decoder.max_position, decoder.sliding_window or decoder.max_position)  # the context of every layer
        tokenizer, max_tokens = _tokenizer(folder, decoder.vocab_size, most)
        model = CausalEncoder(decoder, load_weights(folder.directory, decoder, dtype, device), ops, max_tokens)
        widths = (decoder.head_dim, decoder.hidden_size, decoder.intermediate_size)
    finish, dim = _finish(folder, model, ops, device)
    return Encoder(
        EncoderConfig(
            kind=folder.kind,
            architecture=folder.architecture,
            dim=dim,
            max_tokens=max_tokens,
            vocab_size=model.config.vocab_size,
            default_prompt=folder.default_prompt,
        ),
        tokenizer,
        model,
        finish,
        device,
        # of other widths torch's loops have a rest, whose place in a tensor decides how it is computed; that of the
        # approximate GELU has one of any width, where threads divide a tensor
        ops.batch_invariant and dtype == torch.float32 and not approximates and not any(width % 16 for width in widths),
    )


def _decoder_config(folder: EncoderFolder) -> ModelConfig:
    file = folder.config
    if folder.architecture not in [name + kind for name in _DECODERS for kind in ("Model", "ForCausalLM")]:
        bidirectional = ", ".join(f"{name}Model" for name in FAMILIES)
        decoders = ", ".join(f"{name}Model" for name in _DECODERS)
        raise file.wrong(
            "architectures",
            f"{bidirectional}, their ForSequenceClassification, {decoders} and their ForCausalLM are supported",
        )
    if not file.flag("is_causal", default=True):
        raise file.wrong("is_causal", "a decoder that looks both ways is not supported")
    return read_model_config(folder.directory)


def _tokenizer(folder: EncoderFolder, vocab_size: int, most: int) -> tuple[Tokenizer, int]:
    """Return the tokenizer, and the most tokens of an input: `most` of the model, or the folder's trained length."""
    tokenizer = Tokenizer.from_dir(folder.directory, vocab_size)
    if folder.kind == "score":
        tokenizer.take_special_tokens_as_text()  # a text that spells the separator must not end there
    if folder.lower_case and tokenizer.encode_text("A", False) != tokenizer.encode_text("a", False):
        raise ModelLoadError(
            f"{folder.directory}: the sentence config says do_lower_case, and tokenizer.json distinguishes A from a; "
            'give it a normalizer {"type": "Lowercase"}'
        )
    limit = folder.max_seq_length or json.loads(tokenizer.info).get("model_max_length")
    return tokenizer, min(most, limit) if isinstance(limit, int) and limit > 0 else most


def _separator(folder: EncoderFolder, tokenizer: Tokenizer) -> int:
    if tokenizer.sep_token_id is None:
        raise ModelLoadError(
            f"{folder.directory / 'tokenizer_config.json'}: no sep_token of the vocabulary is named; the model tells "
            "two texts apart by it"
        )
    return tokenizer.sep_token_id


def _finish(
    folder: EncoderFolder, model: Bert | CausalEncoder, ops: Ops, device: torch.device
) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the function from hidden states to results, and the size of a result."""
    if isinstance(model, Bert) and folder.kind == "score":
        activation = ACTIVATIONS[folder.score_activation]
        return lambda hidden: activation(model.logits(hidden[:, 0].float())).unsqueeze(1), 1
    dim = model.config.hidden_size * len(folder.poolings)
    steps: list[Callable[[Tensor], Tensor]] = []
    for step in folder.pooled:
        if step == "normalize":
            steps.append(normalize)
            continue
        if step.in_features != dim:
            raise ModelLoadError(
                f"{step.directory / 'config.json'}: in_features is {step.in_features}; the {dim} of what comes before "
                "is expected"
            )
        steps.append(Dense(step, ops, device))
        dim = step.out_features

    def finish(hidden: Tensor) -> Tensor:
        return functools.reduce(lambda vectors, step: step(vectors), steps, pool(hidden, folder.poolings))

    return finish, dim
