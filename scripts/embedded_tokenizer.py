"""The embedded model's tokenizer and chat template: byte-level BPE with single digits and separate spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
MAX_POSITIONS = 2048
CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"  # in the vocabulary, and in what clients may read
TOOL = "<|tool|>"
BEGIN, END, SYSTEM, USER, ASSISTANT = CONTROL_TOKENS = (
    "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip

# A space is a token of its own except after a comma, so that a word is the same token wherever it stands.
_PIECES = Regex(r"\p{N}|, |\p{L}+|[^\s\p{L}\p{N}]|\s")

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- macro text(content) -%}
  {%- if content is string -%}{{- content | trim -}}
  {%- else -%}{%- for part in content or [] -%}{{- part.text | trim -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro tool_lines() -%}
  {%- for tool in tools -%}
    {%- set function = tool.function or tool -%}
    {{- '\\n' if not loop.first }}{"name": {{ function.name | tojson }}, "parameters": {
    {%- for name, schema in ((function.parameters or {}).properties or {}) | items -%}
      {{- ', ' if not loop.first }}{{ name | tojson }}: {{ (schema.enum or schema.type or 'any') | tojson -}}
    {%- endfor -%}
    }}
  {%- endfor -%}
{%- endmacro -%}
{%- macro calls(message) -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set function = call.function or call -%}
    {{- '\\n' if message.content or not loop.first }}<tool_call>
{"name": {{ function.name | tojson }}, "arguments": {{ function.arguments if function.arguments is string
      else (function.arguments or {}) | tojson }}}
</tool_call>
  {%- endfor -%}
{%- endmacro -%}
{%- set lines = tool_lines() if tools else '' -%}
{%- if lines and (not messages or messages[0].role not in ('system', 'developer')) -%}
  {{- '<|system|>' ~ lines ~ eos_token -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set said = text(message.content) -%}
  {%- if message.role in ('system', 'developer') -%}
    {{- '<|system|>' ~ said ~ ('\\n' if said and lines and loop.first) ~ (lines if loop.first) -}}
  {%- elif message.role == 'user' -%}{{- '<|user|>' ~ said -}}
  {%- elif message.role == 'assistant' -%}{{- '<|assistant|>' ~ said ~ calls(message) -}}
  {%- elif message.role == 'tool' -%}{{- '<|tool|>' ~ said -}}
  {%- else -%}
    {{- raise_exception('This model knows the roles system, user, assistant and tool, not ' ~ message.role) -}}
  {%- endif -%}
  {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# How an answer is parsed (transformers 5.13 and later): text, and calls as JSON between their tokens.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "content": {"close": END},
        "tool_calls": {
            "open_pattern": r"\s*" + CALL_OPENS,
            "close": CALL_CLOSES,
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}


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
    return with_tool_tokens(tokenizer)


def with_tool_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the tokens of tool calls and results, which take the places of its last merges.

    All other tokens keep their ids, so that weights trained with the one go on with the other.
    """
    added = [AddedToken(token, special=False, normalized=False) for token in (CALL_OPENS, CALL_CLOSES)]
    added.append(AddedToken(TOOL, special=True, normalized=False))
    if all(tokenizer.token_to_id(token.content) is not None for token in added):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    del state["model"]["merges"][-len(added) :]
    first_id = tokenizer.get_vocab_size() - len(added)
    state["model"]["vocab"] = {token: id_ for token, id_ in state["model"]["vocab"].items() if id_ < first_id}
    smaller = Tokenizer.from_str(json.dumps(state))
    for token in added:
        (smaller.add_special_tokens if token.special else smaller.add_tokens)([token])
    return smaller


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
        "response_template": RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
