"""Answers of many families become messages: the same for any split of their text, and the same as transformers'."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from backend.text.response_templates.calls import CallArguments, CallStart
from backend.text.response_templates.parser import Part, ResponseParser, TextDelta
from backend.text.response_templates.template import ResponseTemplate
from tests.backend.text.response_templates.families import FAMILIES, Message, cut, messages, parsed
from tests.examples import examples

TEMPLATES = {name: ResponseTemplate(family.source) for name, family in FAMILIES.items()}
HERMES = TEMPLATES["hermes"]
CUTS = st.lists(st.integers(0, 2000), max_size=12)
ANY_TEXT = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": ',
            '{"a": [1, "}"]}',
            "}",
            "<function=f>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "<|im_end|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[",
            "<|channel|>",
            "analysis",
            "commentary to=functions.f",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "final",
            "text",
            " ",
            "\n",
            "<",
            '"',
            "\\",
            "{",
            "]",
            ",",
            ":",
            "null",
            "\x01",
            "é",
        ]
    ),
    max_size=20,
).map("".join)


def loaded(message: Message) -> Message:
    return Message(message.content, message.reasoning, tuple((n, json.loads(a)) for n, a in message.calls))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(12))
@given(data=st.data())
def test_a_message_is_what_the_model_meant_and_what_transformers_reads(name: str, data: st.DataObject) -> None:
    message = data.draw(messages(FAMILIES[name]))
    text = FAMILIES[name].write(message)
    assert loaded(parsed(TEMPLATES[name], cut(text, data.draw(CUTS)))) == message == oracle(name, text)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(12))
@given(text=ANY_TEXT, cuts=CUTS, with_calls=st.booleans(), is_cut=st.booleans())
def test_any_split_of_any_text_gives_the_same_message(
    name: str, text: str, cuts: list[int], with_calls: bool, is_cut: bool
) -> None:
    template = TEMPLATES[name]
    whole = parsed(template, [text], with_calls=with_calls, is_cut=is_cut)
    assert parsed(template, cut(text, cuts), with_calls=with_calls, is_cut=is_cut) == whole
    assert parsed(template, list(text), with_calls=with_calls, is_cut=is_cut) == whole
    assert with_calls or not whole.calls


@cache
def oracle_template(name: str) -> object:
    return load_response_template(dict(FAMILIES[name].source))


def oracle(name: str, text: str) -> Message:
    message: dict[str, Any] = parse_response(text, oracle_template(name), prefix="")
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Message(message.get("content", ""), reasoning, tuple((call["name"], call["arguments"]) for call in calls))


def test_arguments_are_delivered_as_they_come() -> None:
    parser = ResponseParser(HERMES, with_calls=True)
    events = [
        parser.feed(piece) for piece in ['<tool_call>{"name": "f"', ', "arguments": {"a"', ": 1", "}}</tool_", "call>"]
    ]
    assert events == [
        [],
        [CallStart("f"), CallArguments('{"a"')],
        [CallArguments(": 1")],
        [CallArguments("}")],
        [],
    ]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("a <tool_call>{oops}</tool_call> b", "a <tool_call>{oops}</tool_call> b", ()),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, ()),
        ('<tool_call>{"name": "f"}</tool_call>', None, ()),
        ('<tool_call>{"name": "f", "argu', None, ()),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>', "", (("f", '{"a": 1, oops}'),)),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut sho', "", (("f", '{"a": "cut sho'),)),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', "", (("f", "{}"),)),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f", "id": "x"}</tool_call>', "", (("f", '{"a": 1}'),)),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", (("f", '{"a": 1}'),)),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "and more", (("f", "{}"),)),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            (("f", '{"a": "</tool_call>"}'),),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": "\n</tool_call> b', "b", (("f", '{"a": "\n'),)),
        ("no call <tool_cal", "no call <tool_cal", ()),
    ],
)
def test_malformed_calls_stay_content_and_nothing_is_repaired(text: str, content: str | None, calls: Any) -> None:
    assert parsed(HERMES, list(text)) == Message(text if content is None else content, "", calls)


def test_without_tools_a_call_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed(HERMES, [text], with_calls=False) == Message(text)


def test_reasoning_that_the_prompt_has_begun() -> None:
    prompt = "<|im_start|>user\n<think>x</think><|im_end|>\n<|im_start|>assistant\n<think>\n"
    parser = ResponseParser(HERMES, HERMES.begun(prompt))
    assert parser.is_reasoning
    assert parser.feed("Hm") == [TextDelta(Part.REASONING, "Hm")]
    assert parser.feed("\n</think>\n\nHi ") == [TextDelta(Part.CONTENT, "Hi")]
    assert not parser.is_reasoning
    assert not ResponseParser(HERMES, HERMES.begun(prompt + "a</think>")).is_reasoning
    assert not ResponseParser(
        HERMES, HERMES.begun("<think>")
    ).is_reasoning  # no anchor: nothing of the prompt is the answer's


def test_an_answer_that_ends_in_its_reasoning_has_no_content() -> None:
    assert parsed(HERMES, ["<think>", "so ", "far"]) == Message("", "so far")


def test_texts_of_one_part_follow_one_another() -> None:
    text = 'First.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nThen.<think>a</think> <think>b</think>'
    assert parsed(HERMES, [text]) == Message("First.\nThen.", "a\nb", (("f", "{}"),))
    blocks = "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two."
    assert parsed(TEMPLATES["gpt-oss"], [blocks]) == Message("One.\n\nTwo.")


def test_arguments_without_types_are_typed_by_the_schema() -> None:
    names = ["integer", "number", "boolean", "null", "array", "string"]
    tools = {"f": {name: {"type": name} for name in names}}
    values = ["7", "1.50", "True", "None", "[1]", "7"]
    tags = "".join(f"<parameter={name}>{value}</parameter>" for name, value in zip(names, values, strict=True))
    text = f"<tool_call><function=f>{tags}<parameter=other>7</parameter></function></tool_call>"
    message = parsed(TEMPLATES["qwen3-coder"], list(text), tools=tools)
    assert loaded(message).calls == (
        ("f", {**dict(zip(names, [7, 1.5, True, None, [1], "7"], strict=True)), "other": "7"}),
    )


def test_tags_that_are_cut_short_are_left_as_they_are() -> None:
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2"
    assert parsed(TEMPLATES["qwen3-coder"], [text], is_cut=True).calls == (("f", '{"a": "1"'),)
    assert parsed(TEMPLATES["qwen3-coder"], [text]).calls == (("f", '{"a": "1"}'),)


def test_a_place_with_empty_delimiters_is_passed() -> None:
    fields = {"thinking": {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}, "content": {}}
    template = ResponseTemplate({"start_anchor": "x", "fields": fields})
    message = parsed(template, list("aab"))
    assert sorted(message.content + message.reasoning.replace("\n", "")) == ["a", "a", "b"]
