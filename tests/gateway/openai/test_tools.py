"""What a request says of tools is read or refused by its place."""

from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai.tools import MAX_TOOLS_BYTES, read_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def tool(name: str = "f", **function: Any) -> Any:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_are_offered_as_the_request_has_them() -> None:
    use = read_tools([tool(description="d", parameters=SCHEMA, strict=True), tool("g")], None, None)
    assert use is not None
    assert (use.choice, use.is_single, use.is_constrained) == ("auto", False, True)
    first, second = use.functions
    assert (first.name, first.parameters, first.is_strict, first.param) == (
        "f", SCHEMA, True, "tools[0].function.parameters",
    )  # fmt: skip
    assert second.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert use.definitions[0] == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": SCHEMA},
    }
    assert read_tools(None, "none", True) is None and read_tools([], "auto", None) is None


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


SHORT = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        ("none", None, ("none", False, False, ["f", "g"])),
        ("auto", False, ("auto", True, False, ["f", "g"])),
        ("required", None, ("required", False, True, ["f", "g"])),
        ({"type": "function", "function": {"name": "g"}}, True, ("required", True, True, ["g"])),
        (allowed("required", "g"), None, ("required", False, True, ["g"])),
        (allowed("auto", "g"), None, ("auto", False, True, ["g"])),
        (allowed("auto", "g", "f"), None, ("auto", False, False, ["f", "g"])),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SHORT]}},
            None,
            ("required", False, True, ["f"]),
        ),
    ],
)
def test_tool_choice_bounds_the_calls_of_an_answer(choice: Any, parallel: bool | None, expected: Any) -> None:
    use = read_tools([tool(), tool("g")], choice, parallel)
    assert use is not None
    names = [function.name for function in use.functions]
    assert (use.choice, use.is_single, use.is_constrained, names) == expected
    assert len(use.definitions) == 2  # the model is told of all


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        ([], "required", "tool_choice", "send tools, or leave it out"),
        ([tool()], "any", "tool_choice", 'must be "none"'),
        ([tool()], {"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice", "got an object"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name", "one of the tools"),
        ([tool()], allowed("auto", "g"), "tool_choice.allowed_tools.tools", "one of the tools, got 'g'"),
        ([tool()], allowed("none", "f"), "tool_choice", "must be"),
        ([tool()], allowed("required"), "tool_choice", "must be"),
        ([], allowed("auto", "f"), "tool_choice", "send tools"),
        (
            [tool()],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            "tool_choice.allowed_tools.tools",
            "null",
        ),
        ([tool(), tool()], None, "tools[1].function.name", "another tool too"),
        ([tool(parameters={"x": "y" * MAX_TOOLS_BYTES})], None, "tools", "at most 256KiB are read"),
        ([tool(parameters=nested(2000))], None, "tools", "nested too deeply"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(tools: Any, choice: Any, param: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refusal:
        read_tools(tools, choice, None)
    assert refusal.value.param == param
