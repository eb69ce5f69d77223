"""Messages with calls and their results become what chat templates read."""

from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.openai.messages import Message, message_size, template_messages


def call(arguments: Any, call_id: str = "a", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


DEEP = '{"a":' * 102 + "1" + "}" * 102


def read(*messages: Any) -> tuple[Message, ...]:
    return template_messages(messages)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("", {}),
        ('{"a": 1', '{"a": 1'),  # as a model has left it
        ("[1]", {}),
        (" null\n", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        (DEEP, DEEP),
    ],
)
def test_arguments_are_objects_for_templates(arguments: Any, expected: Any) -> None:
    (message,) = read({"role": "assistant", "content": None, "tool_calls": [call(arguments)]})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": expected}}],
    }


def test_a_result_has_the_name_of_its_function() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [call("{}"), call("{}", "b", "g")]}
    results = [{"role": "tool", "tool_call_id": one, "content": "x"} for one in ("b", "a", "c")]
    _, *told = read(calls, *results)
    assert [message.get("name") for message in told] == ["g", "f", None]
    assert told[0] == {"role": "tool", "tool_call_id": "b", "content": "x", "name": "g"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "messages[0].tool_calls"),
    ],
)
def test_a_missing_or_foreign_field_of_a_role_is_refused_by_its_place(message: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        read(message)
    assert refusal.value.param == param


def test_reasoning_is_told_by_one_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        (message,) = read({"role": "assistant", "content": "x", name: "hm"})
        assert message == {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert read({"role": "user", "content": "x", "reasoning": "hm"}) == ({"role": "user", "content": "x"},)


def test_the_size_of_a_message_counts_its_calls() -> None:
    arguments = orjson.dumps({"a": "x" * 1000}).decode()
    (message,) = read({"role": "assistant", "content": "abc", "reasoning": "d", "tool_calls": [call(arguments)]})
    assert message_size(message) == 3 + 1 + 1 + len(arguments)
