"""The embedded model's tokenizer and chat template: byte-level BPE with single digits and separate spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
MAX_POSITIONS = 2048
BEGIN, END, SYSTEM, USER, ASSISTANT = CONTROL_TOKENS = (
    "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip

# A space is a token of its own except after a comma, so that a word is the same token wherever it stands.
_PIECES = Regex(r"\p{N}|, |\p{L}+|[^\s\p{L}\p{N}]|\s")

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role in ('system', 'developer') -%}{{- '<|system|>' -}}
  {%- elif message.role == 'user' -%}{{- '<|user|>' -}}
  {%- elif message.role == 'assistant' -%}{{- '<|assistant|>' -}}
  {%- else -%}{{- raise_exception('This model knows the roles system, user and assistant, not ' ~ message.role) -}}
  {%- endif -%}
  {%- if message.content is string -%}{{- message.content | trim -}}
  {%- else -%}{%- for part in message.content or [] -%}{{- part.text | trim -}}{%- endfor -%}
  {%- endif -%}
  {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Every byte is in the vocabulary, so any UTF-8 text encodes and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, and tokenizer_config.json with the chat template, as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
