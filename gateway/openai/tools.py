"""The tools that a request offers, and how its answer may call them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required

import orjson
from pydantic import Field, with_config
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, shown
from gateway.openai.foreign_fields import ECHOES, known_object

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18  # of all of them, as JSON
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_CHOICES = ("none", "auto", "required")


@with_config(EXACT)
class FunctionTool(TypedDict, total=False):
    name: Required[Annotated[str, Field(pattern=_NAME)]]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


@with_config(EXACT)
class ToolDefinition(TypedDict):
    type: Literal["function"]
    function: Annotated[FunctionTool, known_object(FunctionTool, "tools[].function.", echoes=ECHOES)]


_Tool = Annotated[ToolDefinition, known_object(ToolDefinition, "tools[].", echoes=ECHOES)]
Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Function:
    """One function that may be called."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    is_strict: bool  # calls have arguments that the schema allows, or none are made
    param: str  # the field of the request that has its schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and what its answer may do with them."""

    definitions: tuple[Mapping[str, Any], ...]  # as chat templates read them
    functions: tuple[Function, ...]  # that may be called
    choice: Literal["none", "auto", "required"]
    is_single: bool  # at most one call
    size: int  # bytes

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar has to see to the calls."""
        return self.choice == "required" or (self.choice == "auto" and any(one.is_strict for one in self.functions))


def read_tools(tools: Sequence[ToolDefinition] | None, choice: Any, parallel_tool_calls: bool | None) -> ToolUse | None:
    """Returns the tools that a request offers; None for none. Raises `BadRequest`."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice needs tools to choose from: send tools, or leave it out.", "tool_choice")
        return None
    size = _size(tools)
    if size > MAX_TOOLS_BYTES:
        raise BadRequest(
            f"tools have {size} bytes; at most {MAX_TOOLS_BYTES} are read. Send fewer of them, or smaller schemas.",
            "tools",
        )
    functions = _functions(tools)
    kind, named = _read_choice(choice, {function.name for function in functions})
    if named is not None:
        functions = [function for function in functions if function.name == named]
    is_single = parallel_tool_calls is False or named is not None
    definitions = tuple([{"type": "function", "function": _told(tool["function"])} for tool in tools])
    return ToolUse(definitions, tuple(functions), kind, is_single, size)


def _size(tools: Sequence[ToolDefinition]) -> int:
    try:
        return len(orjson.dumps(tools))
    except TypeError:  # its nesting is beyond what the library writes
        raise BadRequest("tools are nested too deeply.", "tools") from None


def _functions(tools: Sequence[ToolDefinition]) -> list[Function]:
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        name, param = function["name"], f"tools[{index}].function"
        if name in functions:
            raise BadRequest(f"{param}.name is {name!r}, which another tool has too.", f"{param}.name")
        # without parameters a function takes none
        parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        functions[name] = Function(name, parameters, bool(function.get("strict")), f"{param}.parameters")
    return list(functions.values())


def _told(function: FunctionTool) -> dict[str, Any]:
    """Returns what a chat template is told of a function; `strict` is none of the model's concern."""
    told = {"name": function["name"], "description": function.get("description") or ""}
    return {**told, "parameters": function.get("parameters") or {"type": "object", "properties": {}}}


def _read_choice(choice: Any, names: set[str]) -> tuple[Literal["none", "auto", "required"], str | None]:
    """Returns what the answer may do, and the name of the one function that it has to call."""
    match choice:
        case None:
            return "auto", None
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name), **others}, **rest} if not others and not rest:
            if name not in names:
                where = "tool_choice.function.name"
                raise BadRequest(f"{where} must be that of one of the tools, got {shown(name)}.", where)
            return "required", name
    raise BadRequest(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": string}}, '
        f"got {shown(choice)}.",
        "tool_choice",
    )
