"""Messages as models of several families write them, and the response templates that read them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from backend.text.response_templates import builtin
from backend.text.response_templates.calls import CallStart, Properties
from backend.text.response_templates.parser import Event, Part, ResponseParser, TextDelta
from backend.text.response_templates.template import ResponseTemplate

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Message:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Family:
    """How a family of models writes a message. `source` is the template, as a checkpoint has it."""

    source: Mapping[str, Any]
    write: Callable[[Message], str]
    reasons: bool = True
    most_calls: int = 3
    typed: bool = True  # arguments are JSON
    free: bool = True  # content may stand before calls


def _joined(*parts: str) -> str:
    return "".join(parts)


def _think(message: Message) -> str:
    return f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""


def _hermes(message: Message) -> str:
    calls = [f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in message.calls]
    return _joined(_think(message), message.content, *calls, "<|im_end|>")


def _coder(message: Message) -> str:
    calls = []
    for name, arguments in message.calls:
        tags = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
        calls.append(f"\n<tool_call>\n<function={name}>\n{''.join(tags)}</function>\n</tool_call>")
    return _joined(_think(message), message.content, *calls, "<|im_end|>")


def _llama(message: Message) -> str:
    calls = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in message.calls]
    return _joined(message.content, *calls, "<|eot_id|>")


def _mistral(message: Message) -> str:
    calls = json.dumps([{"name": name, "arguments": arguments} for name, arguments in message.calls])
    return _joined(message.content, f"[TOOL_CALLS] {calls}" if message.calls else "", "</s>")


def _mistral_args(message: Message) -> str:
    calls = [f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in message.calls]
    return _joined(_think(message), message.content, *calls, "</s>")


def _harmony(message: Message) -> str:
    parts = [f"<|channel|>analysis<|message|>{message.reasoning}<|end|>"] if message.reasoning else []
    parts += [f"<|channel|>final<|message|>{message.content}<|end|>"] if message.content else []
    for name, arguments in message.calls:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        parts.append(f"{header}{json.dumps(arguments)}<|call|>")
    return "<|start|>assistant".join(parts)


def deepseek(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_BEGIN, _END, _SEPARATOR = deepseek("tool call begin"), deepseek("tool call end"), deepseek("tool sep")


def _deepseek(message: Message) -> str:
    calls = [
        f"{_BEGIN}function{_SEPARATOR}{name}\n```json\n{json.dumps(arguments)}\n```{_END}"
        for name, arguments in message.calls
    ]
    wrapped = deepseek("tool calls begin") + "\n".join(calls) + deepseek("tool calls end") if calls else ""
    return _joined(_think(message), message.content, wrapped, deepseek("end of sentence"))


def _cohere(message: Message) -> str:
    calls = json.dumps([{"tool_call_id": "0", "tool_name": n, "parameters": a} for n, a in message.calls])
    return _joined(
        f"<|START_THINKING|>{message.reasoning}<|END_THINKING|>" if message.reasoning else "",
        f"<|START_RESPONSE|>{message.content}<|END_RESPONSE|>" if message.content else "",
        f"<|START_ACTION|>{calls}<|END_ACTION|>" if message.calls else "",
    )


def _gemma(message: Message) -> str:
    calls = [f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in message.calls]
    thought = f"<|channel>thought\n{message.reasoning}<channel|>" if message.reasoning else ""
    return _joined(thought, message.content, *calls, "<turn|>")


def _gemma_value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{_gemma_value(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma_value, value)) + "]"
        case str():
            return f'<|"|>{value}<|"|>'
    return json.dumps(value)


_COHERE = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
_GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        "content": {"close": ["<turn|>", "<|tool_response>"]},
    },
}


def _builtin(marks: str) -> Mapping[str, Any]:
    source = builtin.builtin_source(f"<think> <|im_end|> <|eot_id|> </s> {deepseek('end of sentence')} {marks}")
    assert source is not None
    return source


FAMILIES = {
    "hermes": Family(_builtin("<tool_call>"), _hermes),
    "qwen3-coder": Family(_builtin("<tool_call> <function="), _coder, typed=False),
    "llama3": Family(_builtin('<|start_header_id|> "parameters": '), _llama, False, 1, free=False),
    "mistral": Family(_builtin("[TOOL_CALLS]"), _mistral, False),
    "mistral-args": Family(_builtin("[TOOL_CALLS] [ARGS]"), _mistral_args),
    "gpt-oss": Family(_builtin("<|channel|> <|message|>"), _harmony),
    "deepseek-v3": Family(_builtin(f"{_BEGIN} ```json"), _deepseek),
    "cohere": Family(_COHERE, _cohere),
    "gemma4": Family(_GEMMA, _gemma),
}

_NAMES = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True, alphabet="abcxyz_09")
_TEXTS = st.text("abc .,<>é日😀\"'\\/{}[]\n|_", max_size=20)
_SCALARS = st.none() | st.booleans() | st.integers(-9999, 9999) | st.floats(-9, 9) | _TEXTS
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3), max_leaves=6
)


@st.composite
def messages(draw: st.DrawFn, family: Family) -> Message:
    """Messages that a family can write, and a transform of it does not overwrite."""
    words = st.text("abc .,é日😀'/\n", min_size=1, max_size=30).map(str.strip)
    most = draw(st.integers(0, family.most_calls))
    arguments = st.dictionaries(_NAMES, _VALUES if family.typed else words.filter(bool), max_size=3)
    calls = tuple(draw(st.lists(st.tuples(_NAMES, arguments), min_size=most, max_size=most)))
    content = draw(words) if family.free or not calls else ""
    return Message(content, draw(words) if family.reasons else "", calls)


def parsed(
    template: ResponseTemplate,
    pieces: list[str],
    tools: Properties | None = None,
    with_calls: bool = True,
    is_cut: bool = False,
) -> Message:
    """Return what a client makes of the deltas; the arguments of calls as text."""
    parser = ResponseParser(template, "", tools, with_calls)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.end_text(is_cut)
    return accumulated(events)


def accumulated(events: list[Event]) -> Message:
    texts = dict.fromkeys(Part, "")
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, TextDelta):
            assert event.text
            texts[event.part] += event.text
        elif isinstance(event, CallStart):
            calls.append([event.name, ""])
        else:
            assert event.text
            calls[-1][1] += event.text
    return Message(texts[Part.CONTENT], texts[Part.REASONING], tuple((name, text) for name, text in calls))


def cut(text: str, cuts: list[int]) -> list[str]:
    """Return the pieces of a text that is cut at these places, wherever they are."""
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]
