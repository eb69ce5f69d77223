"""A message is the same whether it comes as deltas or whole."""

import json
from typing import Any

import pytest

from backend.text.response_templates.builtin import builtin_template
from backend.text.response_templates.parser import ResponseParser
from gateway.openai.answer_message import AnswerMessage, MessageChunks, new_call_id
from gateway.openai.replies import Ending, Identity, TokenUsage

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def message(**options: Any) -> AnswerMessage:
    template = builtin_template("<think> <tool_call>")
    assert template is not None
    return AnswerMessage(ResponseParser(template, with_calls=True), **options)


def accumulated(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that clients make of deltas."""
    whole: dict[str, Any] = {"content": None}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                whole[name] = (whole.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = whole.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return whole


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_deltas_add_up_to_the_message(size: int) -> None:
    text = f"<think>hm</think>Well, {CALL}{CALL}"
    one = message()
    deltas = []
    for start in range(0, len(text), size):
        one.push(text[start : start + size])
        deltas += one.deltas()
    one.finish()
    deltas += one.deltas()
    members = one.members()
    assert accumulated(deltas) == members
    assert (members["content"], members["reasoning_content"]) == ("Well,", "hm")
    assert [call["function"] for call in members["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in members["tool_calls"]}) == 2


def test_tokens_of_reasoning_are_counted_with_its_delimiters() -> None:
    one = message(shows_reasoning=False)
    for token in ["<think>", "a", "b", "</think>", "c", "d"]:
        one.push(token)
    one.finish()
    assert one.num_reasoning_tokens == 4
    assert one.members() == {"content": "cd"}


def test_a_single_call_ends_the_message() -> None:
    one = message(is_single=True)
    one.push(CALL[:-3])
    assert one.has_calls and not one.is_over
    one.push(CALL[-3:] + " and more" + CALL)
    assert one.is_over
    one.finish()
    assert len(one.members()["tool_calls"]) == 1 and one.members()["content"] is None


@pytest.mark.parametrize(("text", "content"), [("", ""), ("Hi", "Hi"), ("<think>a</think>", None), (CALL, None)])
def test_content_is_null_beside_something_else(text: str, content: str | None) -> None:
    one = message()
    one.push(text)
    one.finish()
    assert one.members()["content"] == content


def test_log_probabilities_wait_for_an_event() -> None:
    one = message()
    chunks = MessageChunks(Identity("i", 0, "m"), False, 0, one)
    usage = TokenUsage(1, 1)
    events = b""
    for token in ["a", " <tool", "_call", "s ", "b"]:
        one.push(token)
        events += chunks.text(token, usage, {"logprobs": {"content": [token], "refusal": None}})
    one.finish()
    events += chunks.finish(Ending("stop", usage, {"logprobs": {"content": ["end"], "refusal": None}}))
    read = [json.loads(line.removeprefix("data: ")) for line in events.decode().split("\n\n") if line]
    told = [event["choices"][0]["logprobs"] for event in read]
    assert [token for one in told if one for token in one["content"]] == ["a", " <tool", "_call", "s ", "b", "end"]
    assert accumulated([event["choices"][0]["delta"] for event in read])["content"] == "a <tool_calls b"


def test_ids_are_as_long_as_a_template_wants_them() -> None:
    assert len(new_call_id(9)) == 9 and new_call_id(9).isalnum()
    assert new_call_id(None).startswith("call_")
