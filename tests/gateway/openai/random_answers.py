"""Texts of answers with reasoning and calls, in random pieces, and the messages that they are parsed to."""

from typing import Any

from hypothesis import strategies as st

from backend.text.response_templates.builtin import builtin_template
from backend.text.response_templates.parser import ResponseParser
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, ReplyFinishReason

CALL = '<tool_call>{"name": "f", "arguments": {"a": "é", "b": [1]}}</tool_call>'
_PARTS = st.sampled_from(
    [
        "<think>hm, é</think>",
        "<think>",
        "</think>",
        CALL,
        CALL[:-20],
        '<tool_call>{"name": "g"',
        "Well, ",
        "日本 ",
        "\n",
        "<",
    ]
)


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = "".join(draw(st.lists(_PARTS, max_size=6)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def new_message(**options: Any) -> AnswerMessage:
    template = builtin_template("<think> <tool_call>")
    assert template is not None
    return AnswerMessage(ResponseParser(template, with_calls=True), **options)


def whole(text: list[str], is_cut: bool = False, **options: Any) -> Choice:
    """Returns the choice of an answer that is not streamed."""
    message = new_message(**options)
    for piece in text:
        message.push(piece)
    message.finish(is_cut=is_cut)
    choice = Choice("".join(text), reason_of(message, is_cut))
    choice.message, choice.blocks = message.members(), message.blocks()
    return choice


def reason_of(message: AnswerMessage, is_cut: bool) -> ReplyFinishReason:
    return "length" if is_cut else "tool_calls" if message.has_calls else "stop"
