"""Every text that a grammar of calls allows is parsed to calls whose arguments validate; no other is allowed."""

import json
from functools import cache
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from backend.text.response_templates.call_grammar import (
    Tool,
    UnsupportedCalls,
    UnsupportedReasoning,
    call_grammar,
    reasoning_grammar,
)
from backend.text.response_templates.lark import Vocabulary
from backend.text.response_templates.tag_grammar import UnsupportedSchema
from backend.text.response_templates.template import ResponseTemplate
from tests.backend import tiny_tokenizers as tiny
from tests.backend.text.response_templates.families import FAMILIES, Message, deepseek, parsed

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TAGGED = {**WEATHER, "properties": {**WEATHER["properties"], "at": {"type": "object", "$ref": "#/$defs/place"}}}
ENDS = frozenset({"</s>", "<|eot_id|>", "<|im_end|>", "<|call|>", "<|return|>"})
CONSTRAINED = [name for name in FAMILIES if name != "gemma4"]  # its calls are no JSON
EOS = 1


def tools(name: str) -> list[Tool]:
    return [Tool("get_weather", WEATHER if FAMILIES[name].typed else TAGGED), Tool("now", NOTHING)]


def grammar(name: str, **options: bool) -> str:
    asked = {"is_required": True, "is_single": False, "is_reasoning": False, **options}
    return call_grammar(ResponseTemplate(FAMILIES[name].source), tools(name), Vocabulary({}, ENDS), **asked)


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(tiny.byte_level_bpe().to_str(), eos_token=[EOS])


def matcher(lark: str) -> LLMatcher:
    made = LLMatcher(vocabulary(), lark, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allows(lark: str, text: str) -> bool:
    """Whether a grammar allows a text as an answer."""
    one, tokens = matcher(lark), vocabulary().tokenize_str(text)
    return one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()


def sampled(lark: str, random: Random, beginning: str = "") -> str | None:
    """Return a text that a grammar allows, of random tokens after this beginning; None if it takes too many."""
    one, tokens = matcher(lark), vocabulary().tokenize_str(beginning)
    assert one.try_consume_tokens(tokens) == len(tokens)
    enders = {
        token for text in ('"', '"}', '"}}', '"]', "}", "]", "<") for token in vocabulary().tokenize_str(text)[:1]
    }
    for _ in range(300):
        bits = np.unpackbits(np.frombuffer(one.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        assert allowed, vocabulary().decode_str(tokens)
        if EOS in allowed and (random.random() < 0.5 or len(allowed) == 1):
            return vocabulary().decode_str(tokens)
        ending = [token for token in allowed if token in enders]
        choices = ending if ending and random.random() < 0.4 else [token for token in allowed if token != EOS]
        tokens.append(random.choice(choices))
        assert one.consume_token(tokens[-1])
        if one.is_stopped():
            return vocabulary().decode_str(tokens)
    return None


def read(name: str, text: str) -> Message:
    """Return the message in a text, whose calls must be valid."""
    schemas = {tool.name: tool.parameters for tool in tools(name)}
    types = {tool: schema["properties"] for tool, schema in schemas.items()}
    message = parsed(ResponseTemplate(FAMILIES[name].source), [text], tools=types)
    for tool, arguments in message.calls:
        jsonschema.validate(json.loads(arguments), schemas[tool])
    return message


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("name", CONSTRAINED)
def test_required_calls_are_calls_and_nothing_else(name: str, is_single: bool) -> None:
    lark, random = grammar(name, is_single=is_single), Random(name)
    texts = [text for _ in range(8) if (text := sampled(lark, random)) is not None]
    assert texts
    for text in texts:
        message = read(name, text)
        assert message.calls and not message.content, text
        assert len(message.calls) == 1 or not is_single


BEGINNINGS = {
    "hermes": "Let me see.\n<tool_call>",
    "qwen3-coder": "Well\n<tool_call>",
    "llama3": "",
    "mistral": "a[TOOL_CALLS]",
    "mistral-args": "a[TOOL_CALLS]",
    "gpt-oss": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.",
    "cohere": "<|START_ACTION|>",
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_call_in_free_text_is_valid_once_it_begins(name: str) -> None:
    lark, random = grammar(name, is_required=False, is_single=True), Random(name)
    beginning = BEGINNINGS[name] or '{"name"'
    texts = [text for _ in range(6) if (text := sampled(lark, random, beginning)) is not None]
    assert texts
    for text in texts:
        assert len(read(name, text).calls) == 1, text


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("name", CONSTRAINED)
def test_the_grammar_allows_calls_as_the_model_writes_them(name: str, is_required: bool) -> None:
    family = FAMILIES[name]
    reasoning = "I must ask." if family.reasons else ""
    message = Message("", reasoning, (("get_weather", {"city": "Oslo", "days": 3}),))
    text = family.write(message).replace('"tool_call_id": "0", ', "")  # no part of a call that anything depends on
    for end in (*ENDS, deepseek("end of sentence")):
        text = text.removesuffix(end)
    assert allows(grammar(name, is_required=is_required), text), text
    if not is_required and family.free:
        plain = family.write(Message("Hello!", reasoning))
        for end in (*ENDS, deepseek("end of sentence")):
            plain = plain.removesuffix(end)
        assert allows(grammar(name, is_required=False), plain), plain


def test_the_grammar_allows_no_invalid_call() -> None:
    required, optional = grammar("hermes"), grammar("hermes", is_required=False)
    single = grammar("hermes", is_single=True)
    good = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert allows(required, good) and allows(optional, f"Hm. {good}\n{good} Done.") and allows(optional, "Hm.")
    assert allows(required, f"{good}\n{good}") and not allows(single, f"{good}\n{good}")
    assert not allows(required, "Hm.")
    assert not allows(optional, '<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    assert not allows(required, good.replace("{}", '{"x": 1}'))
    assert not allows(optional, good.replace("</tool_call>", ""))


def test_a_delimiter_in_a_string_is_text() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "a</tool_call>b", "days": 1}}</tool_call>'
    assert allows(grammar("hermes"), text)
    ((_, arguments),) = read("hermes", text).calls
    assert json.loads(arguments) == {"city": "a</tool_call>b", "days": 1}
    tags = "<parameter=city>{}</parameter><parameter=days>1</parameter>"
    call = f"<tool_call><function=get_weather>{tags}</function></tool_call>"
    assert allows(grammar("qwen3-coder"), call.format("a</tool_call>"))
    assert not allows(grammar("qwen3-coder"), call.format("a</function></tool_call>"))


def test_reasoning_comes_first_if_the_prompt_has_opened_it() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    lark = grammar("hermes", is_reasoning=True)
    assert allows(lark, f"Hm, <tool_call> or not?</think>\n\n{call}") and not allows(lark, call)
    assert allows(grammar("hermes"), f"<think>Hm</think>\n\n{call}")
    assert allows(grammar("hermes", is_required=False, is_reasoning=True), "Hm</think>Hi")


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_has_no_more_tokens_than_it_may(opened: bool) -> None:
    """The vocabulary's <|im_start|> and <|im_end|> stand for the tokens around reasoning."""
    field = {"open": "<|im_start|>", "close": "<|im_end|>"}
    template = ResponseTemplate({"start_anchor": "A:", "fields": {"thinking": field, "content": {}}})
    ids = {text: vocabulary().tokenize_str(text, parse_special=True)[0] for text in field.values()}
    words = Vocabulary(ids, frozenset({"</s>"}), (EOS,))
    begins, ends = ids["<|im_start|>"], ids["<|im_end|>"]
    lark = reasoning_grammar(template, words, is_reasoning=opened, most_reasoning=3)
    (token,) = vocabulary().tokenize_str("x")
    before = [] if opened else [begins]
    assert matcher(lark).try_consume_tokens([*before, *[token] * 4]) == len(before) + 3
    for answer in ([token, token, token, ends, token, begins, token], [ends, token], [token, ends]):
        one = matcher(lark)
        assert one.try_consume_tokens([*before, *answer]) == len(before) + len(answer) and one.is_accepting()
    assert (matcher(lark).try_consume_tokens([token] * 9) == 9) == (not opened)  # a model need not reason
    none = reasoning_grammar(template, words, is_reasoning=True, most_reasoning=0)
    assert matcher(none).try_consume_tokens([token]) == 0
    assert matcher(none).try_consume_tokens([ends, token]) == 2


def test_reasoning_without_tokens_of_its_own_cannot_be_bounded() -> None:
    with pytest.raises(UnsupportedReasoning, match="opens"):
        reasoning_grammar(
            ResponseTemplate(FAMILIES["hermes"].source), Vocabulary({}, ENDS), is_reasoning=False, most_reasoning=3
        )


def test_special_tokens_are_named_by_their_numbers() -> None:
    template = ResponseTemplate(FAMILIES["mistral"].source)
    lark = call_grammar(
        template, tools("mistral"), Vocabulary({"[TOOL_CALLS]": 5}, ENDS),
        is_required=True, is_single=True, is_reasoning=False,
    )  # fmt: skip
    assert "<[5]>" in lark and "[TOOL_CALLS]" not in lark


def test_a_schema_or_format_that_no_grammar_can_enforce_is_refused() -> None:
    with pytest.raises(UnsupportedCalls, match="a format of its own, which is not JSON"):
        grammar("gemma4")
    asked = {"is_required": True, "is_single": False, "is_reasoning": False}
    template = ResponseTemplate({"start_anchor": "A:", "fields": {"content": {}}})
    with pytest.raises(UnsupportedCalls, match="no field tool_calls"):
        call_grammar(template, [Tool("f", NOTHING)], Vocabulary({}, ENDS), **asked)
    coder = ResponseTemplate(FAMILIES["qwen3-coder"].source)
    for schema in ({"type": "string", "pattern": "a"}, {"type": ["string", "null"]}, True, {"enum": [1]}):
        tool = Tool("f", {"type": "object", "properties": {"city": schema}})
        with pytest.raises(UnsupportedSchema, match="'city'"):
            call_grammar(coder, [tool], Vocabulary({}, ENDS), **asked)
