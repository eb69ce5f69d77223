"""Chat templates of the families that are served, as small as what they do with texts allows, and their tokens."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from backend.text.chat_template import ChatTemplate
from backend.text.tokenizer import DEFAULT_TOOLS, Tokenizer, control_tokens
from tests.backend.text.response_templates.families import deepseek
from tests.backend.tiny_tokenizers import byte_level_bpe

_HERE = Path(__file__).parent
_EMBEDDED = _HERE.parents[3] / "backend" / "embedded" / "tokenizer_config.json"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES: Mapping[str, str] = {
    "chatml": DEFAULT_TOOLS + CHATML,
    "embedded": json.loads(_EMBEDDED.read_text(encoding="utf-8"))["chat_template"],
    **{path.stem: path.read_text(encoding="utf-8") for path in sorted(_HERE.glob("*.jinja"))},
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|tool|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", deepseek("end of sentence"),
]  # fmt: skip
NOT_SPECIAL = [  # though models are told by them who thinks, calls or answers
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|fim_middle|>",
    "<arg_key>", "</arg_key>",
    *map(deepseek, ("User", "Assistant", "tool call begin", "tool sep", "tool call end", "tool output begin")),
    deepseek("tool output end"),
]  # fmt: skip
TEXTS = ["  ", "plain added"]  # added tokens that tell a model nothing of the kind


def core(base: tokenizers.Tokenizer | None = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str((base or byte_level_bpe()).to_str())
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False) for text in [*NOT_SPECIAL, *TEXTS]])
    return made


@cache
def tokenizer(name: str, is_parsed: bool = False) -> Tokenizer:
    """One of the templates, with the control tokens of all; `is_parsed`: those that a request spells are such too."""
    return tokenizer_of(TEMPLATES[name], core(), is_parsed)


def tokenizer_of(source: str, core: tokenizers.Tokenizer, is_parsed: bool = False) -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    control = None if is_parsed else control_tokens(core, source)
    return Tokenizer(core, special, ChatTemplate(source, special, control=control))
