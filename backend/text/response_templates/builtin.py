"""Response templates for checkpoints that have none, chosen by the delimiters in their chat templates.

A chat template writes earlier calls into the prompt as the model writes its own, so it holds the same delimiters.
"""

from collections.abc import Mapping
from typing import Any

from backend.text.response_templates.template import ResponseTemplate

_Source = dict[str, Any]


def _deepseek(words: str) -> str:
    """Return a special token as DeepSeek spells it, with wide bars and low blocks."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINK = {"open": "<think>", "close": "</think>"}
_ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "[/INST]",
    _deepseek("Assistant"),
    "<|start|>assistant",
    "<|assistant|>",
    "<start_of_turn>model\n",
)
_ENDS = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    _deepseek("end of sentence"),
    "</s>",
    "<end_of_turn>",
]

_HERMES = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_QWEN3_CODER = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "transform": _NAMED,
}
_LLAMA3_JSON = {  # the answer is the call, and nothing else
    "open_pattern": r'(?:^\s*|<\|python_tag\|>\s*)(?=\{\s*"name"\s*:)',
    "close": ["<|eot_id|>", "<|eom_id|>"],
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
}
_MISTRAL = {
    "open": "[TOOL_CALLS]",
    "close": "</s>",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}
_MISTRAL_ARGS = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\s]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
    "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
    "repeats": True,
    "content": "json",
    "transform": _NAMED,
}
_BEGIN = rf"(?:{_deepseek('tool calls begin')})?\s*{_deepseek('tool call begin')}"
_END = f"{_deepseek('tool call end')}(?:{_deepseek('tool calls end')})?"
_SEPARATOR = _deepseek("tool sep")
_DEEPSEEK_V3 = {
    "open_pattern": rf"{_BEGIN}function{_SEPARATOR}(?P<name>[^\n]+)\n```json\n",
    "close_pattern": f"\n```{_END}",
    "repeats": True,
    "content": "json",
    "transform": _NAMED,
}
_DEEPSEEK_V31 = {
    "open_pattern": f"{_BEGIN}(?P<name>[^<]+){_SEPARATOR}",
    "close_pattern": _END,
    "repeats": True,
    "content": "json",
    "transform": _NAMED,
}
_HARMONY: _Source = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open": "<|channel|>analysis<|message|>",
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
            "join": "\n",
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
            "join": "\n\n",
        },
        "tool_calls": {
            "open_pattern": (
                r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+)"
                r"| to=functions\.(?P<name>[\w.-]+)<\|channel\|>(?:commentary|analysis))"
                r"(?: ?<\|constrain\|>\w+| json)?<\|message\|>"
            ),
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
    },
}


def builtin_template(chat_template: str) -> ResponseTemplate | None:
    """Return the response template of models with this chat template, or None if it marks no part of an answer."""
    source = builtin_source(chat_template)
    return None if source is None else ResponseTemplate(source)


def builtin_source(chat_template: str) -> Mapping[str, Any] | None:
    """Return that template as a checkpoint would have it."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return _HARMONY
    fields: _Source = {}
    if "<think>" in chat_template or "</think>" in chat_template:
        fields["reasoning_content"] = _THINK
    calls = _calls(chat_template)
    if calls is not None:
        fields["tool_calls"] = calls
    if not fields:
        return None
    ends = [end for end in _ENDS if end in chat_template]
    fields["content"] = {"close": ends} if ends else {}
    return {"start_anchor": list(_ANCHORS), "fields": fields}


def _calls(chat_template: str) -> Mapping[str, Any] | None:
    """Return the field of the calls that this chat template writes."""
    if "[TOOL_CALLS]" in chat_template:
        return _MISTRAL_ARGS if "[ARGS]" in chat_template else _MISTRAL
    if _deepseek("tool call begin") in chat_template:
        return _DEEPSEEK_V3 if "```json" in chat_template else _DEEPSEEK_V31
    if "<tool_call>" in chat_template:
        return _QWEN3_CODER if "<function=" in chat_template else _HERMES
    if '"parameters": ' in chat_template and "<|start_header_id|>" in chat_template:
        return _LLAMA3_JSON
    return None
