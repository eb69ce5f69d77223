"""The items of an input become the messages of a conversation, or are refused by their place."""

from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai.foreign_fields import Ignored
from gateway.openai.messages import MAX_MESSAGES, Message
from gateway.openai.response_items import read_items, read_messages

HI = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"n": 1}'}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "2"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


def called(*ids: str, names: str = "ff", arguments: Any = None, **others: Any) -> Message:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments or {"n": 1}}, "id": one}
        for one, name in zip(ids, names, strict=False)
    ]
    return {"role": "assistant", "content": "", **others, "tool_calls": calls}


def told(call_id: str = "a", **others: Any) -> Message:
    return {"role": "tool", "content": "2", "tool_call_id": call_id, **others}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Hi", [HI]),
        ([HI], [HI]),
        ([{"type": "message", **HI}], [HI]),
        ([{"role": "developer", "content": "Hi"}], [{"role": "system", "content": "Hi"}]),
        ([{"role": "user", "content": [part("input_text", "H"), part("input_text", "i")]}], [HI]),
        (
            [{"role": "assistant", "content": [part("output_text", "a"), {"type": "refusal", "refusal": "b"}]}],
            [{"role": "assistant", "content": "ab"}],
        ),
        ([HI, CALL, RESULT], [HI, called("a"), told(name="f")]),
        ([CALL, {**CALL, "call_id": "b"}, RESULT], [called("a", "b"), told(name="f")]),
        (
            [{"role": "assistant", "content": "Well,"}, CALL, RESULT],
            [called("a", content="Well,"), told(name="f")],
        ),
        ([THOUGHT, CALL, RESULT], [called("a", reasoning_content="hm"), told(name="f")]),
        (
            [THOUGHT, {"role": "assistant", "content": "Well,"}, CALL],
            [called("a", content="Well,", reasoning_content="hm")],
        ),
        ([CALL, THOUGHT, {**CALL, "call_id": "b"}], [called("a", "b", reasoning_content="hm")]),
        ([CALL, {"role": "assistant", "content": "So"}, RESULT], [called("a", content="So"), told(name="f")]),
        ([HI, THOUGHT, HI], [HI, {"role": "assistant", "content": "", "reasoning_content": "hm"}, HI]),
        ([HI, THOUGHT, THOUGHT], [HI, {"role": "assistant", "content": "", "reasoning_content": "hmhm"}]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "y"}], []),
        ([RESULT], [told()]),
        ([{**CALL, "name": "g"}, CALL, {**RESULT, "call_id": "b"}], [called("a", "a", names="gf"), told("b")]),
        ([{**CALL, "arguments": "{oops"}], [called("a", arguments="{oops")]),
        ([{**RESULT, "output": [{"type": "input_text", "text": "2"}]}], [told()]),
    ],
)  # fmt: skip
def test_items_are_messages(given: Any, expected: list[Message]) -> None:
    ignored = Ignored()
    assert [*read_messages(read_items(given), ignored)] == expected
    assert not ignored


ECHOED = {
    "id": "x", "status": "completed", "phase": "final_answer", "namespace": None, "parsed_arguments": {"n": 1},
    "annotations": [1], "caller": {"type": "direct"},
}  # fmt: skip


@pytest.mark.parametrize("item", [HI, CALL, RESULT, THOUGHT], ids=lambda item: item.get("type", "message"))
def test_echoes_are_dropped_and_unknown_fields_are_told(item: dict[str, Any]) -> None:
    plain = read_messages(read_items([item]), None)
    assert read_messages(read_items([item | ECHOED]), None) == plain
    ignored = Ignored()
    assert read_messages(read_items([item | {"mood": "good"}]), ignored) == plain
    assert [*ignored] == ["input[].mood"]
    with pytest.raises(BadRequest) as refusal:
        read_messages(read_items([item | {"mood": "good"}]), None)
    assert refusal.value.param == "input[0].mood"


DEEP: Any = {"a": 1}
for _ in range(101):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (None, "input", "a string, or an array of 1 to 2048 items, got null"),
        ([], "input", "got an array of 0"),
        ([HI] * (MAX_MESSAGES + 1), "input", "got an array of 2049"),
        ([HI, 5], "input[1]", "must be an object, got 5"),
        ([{}], "input[0].type", "is required: one of message, function_call, function_call_output, reasoning"),
        ([{"type": "computer_call"}], "input[0].type", "which this server reads, got 'computer_call'"),
        ([{"type": ["message"], **HI}], "input[0].type", "got an array of 1"),
        ([{"type": "item_reference"}], "input[0].id", "must be the id of an item, got null"),
        ([{"id": 5}], "input[0].id", "must be the id of an item, got 5"),
        ([{"role": "tool", "content": "x"}], "input[0].role", "must be 'system', 'developer', 'user' or 'assistant'"),
        ([{"role": "user"}], "input[0].content", "is required"),
        ([{"role": "user", "content": None}], "input[0].content", "must be a string, got null"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type", "reads texts"),
        ([{**HI, "tool_calls": [1]}], "input[0].tool_calls", "send items of the type function_call instead"),
        ([{**HI, "function_call": {}}], "input[0].function_call", "send items of the type function_call instead"),
        ([{**CALL, "call_id": ""}], "input[0].call_id", "at least 1 character long"),
        ([{**CALL, "call_id": "x" * 257}], "input[0].call_id", "at most 256 characters long"),
        ([{"type": "function_call", "call_id": "a"}], "input[0].name", "is required"),
        ([{**CALL, "arguments": DEEP}], "input[0].arguments", "nested in more than 100 levels"),
        ([{"type": "function_call_output", "call_id": "a"}], "input[0].output", "is required"),
        ([{**RESULT, "output": {"a": 1}}], "input[0].output", "a string, or an array of text parts, got an object"),
        ([{**THOUGHT, "content": "hm"}], "input[0].content", "must be an array"),
        ([{**THOUGHT, "content": [{"type": "x", "text": ""}]}], "input[0].content[0].type", "'reasoning_text'"),
    ],
)
def test_a_malformed_item_is_refused_by_its_place(given: Any, param: str, message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        read_messages(read_items(given), Ignored())
    assert refusal.value.param == param
    assert message in refusal.value.message and refusal.value.message.endswith(".")
