"""The tools of a request, and the calls that its answer may make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required

import orjson
from pydantic import Field, with_config
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, shown
from gateway.openai.foreign_fields import ECHOES, known_object
from quotas.policy.units import show_size

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18  # of all of them, as JSON
_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"


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
    is_strict: bool  # arguments of calls match the schema
    param: str  # the request field with its schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and the calls allowed to its answer."""

    definitions: tuple[Mapping[str, Any], ...]  # as chat templates read them
    functions: tuple[Function, ...]  # that the answer may call
    choice: Literal["none", "auto", "required"]
    is_single: bool  # at most one call
    size: int  # bytes
    is_limited: bool = False  # the prompt lists further functions that it may not call

    @property
    def is_constrained(self) -> bool:
        """True if a grammar enforces the calls."""
        promised = self.is_limited or any(one.is_strict for one in self.functions)
        return self.choice == "required" or (self.choice == "auto" and promised)


def read_tools(
    tools: Sequence[ToolDefinition] | None,
    choice: Any,
    parallel_tool_calls: bool | None,
    places: Sequence[str] | None = None,
    schema_field: str = "parameters",
) -> ToolUse | None:
    """The tools of a request; None without any.

    `places` are the places of the functions in the request, if not a chat's; `schema_field` is the member of a function
    with its schema. Raises `BadRequest`.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest(
                "tool_choice needs tools that the client runs: send tools, or leave it out.",
                "tool_choice",
            )
        return None
    size = _size(tools)
    if size > MAX_TOOLS_BYTES:
        raise BadRequest(
            f"tools have {size:,} bytes; at most {show_size(MAX_TOOLS_BYTES)} are read. Send fewer, or smaller ones.",
            "tools",
        )
    places = places or [f"tools[{index}].function" for index in range(len(tools))]
    functions = _functions(tools, places, schema_field)
    kind, allowed, is_named = _read_choice(choice, {function.name for function in functions})
    may_be_called = tuple([function for function in functions if function.name in allowed])
    is_single = parallel_tool_calls is False or is_named
    definitions = tuple([{"type": "function", "function": _told(tool["function"])} for tool in tools])
    return ToolUse(definitions, may_be_called, kind, is_single, size, len(may_be_called) < len(functions))


def _size(tools: Sequence[ToolDefinition]) -> int:
    try:
        return len(orjson.dumps(tools))
    except TypeError:  # it is nested too deeply for the library
        raise BadRequest("tools are nested too deeply.", "tools") from None


def _functions(tools: Sequence[ToolDefinition], places: Sequence[str], schema_field: str) -> list[Function]:
    functions: dict[str, Function] = {}
    for tool, param in zip(tools, places, strict=True):
        function = tool["function"]
        name = function["name"]
        if name in functions:
            raise BadRequest(f"{param}.name is {name!r}, the name of another tool too: rename one.", f"{param}.name")
        # without parameters a function takes none
        parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        functions[name] = Function(name, parameters, bool(function.get("strict")), f"{param}.{schema_field}")
    return list(functions.values())


def _told(function: FunctionTool) -> dict[str, Any]:
    """A function as the chat template reads it, without `strict`."""
    told = {"name": function["name"], "description": function.get("description") or ""}
    return {**told, "parameters": function.get("parameters") or {"type": "object", "properties": {}}}


def _read_choice(choice: Any, names: set[str]) -> tuple[Literal["none", "auto", "required"], set[str], bool]:
    """The mode, the names of the functions that may be called, and True if one is forced."""
    match choice:
        case None:
            return "auto", names, False
        case "none" | "auto" | "required":
            return choice, names, False
        case {"type": "function", "function": {"name": str(name), **others}, **rest} if not others and not rest:
            return "required", _known([name], names, "tool_choice.function.name"), True
        case {"type": "function", "name": str(name), **rest} if not rest:  # the form of OpenAI's responses
            return "required", _known([name], names, "tool_choice.name"), True
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            where = "tool_choice.allowed_tools.tools"
            return mode, _known([_name_of(tool) for tool in tools], names, where), False
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            return mode, _known([_name_of(tool) for tool in tools], names, "tool_choice.tools"), False
    raise BadRequest(
        'tool_choice must be "none", "auto", "required" or {"type": "function"} with the name of a function, or of the '
        'type "allowed_tools", with a mode, which is "auto" or "required", and some of the tools by their names, got '
        f"{shown(choice)}.",
        "tool_choice",
    )


def _name_of(tool: Any) -> Any:
    """The name in an allowed tool, in the form of chats or of OpenAI's responses."""
    match tool:
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            return name
    return None


def _known(chosen: Sequence[Any], names: set[str], param: str) -> set[str]:
    for name in chosen:
        if not isinstance(name, str) or name not in names:
            raise BadRequest(f"{param} must be the name of one of the tools, got {shown(name)}.", param)
    return set(chosen)
