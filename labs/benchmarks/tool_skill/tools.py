"""Tools as the embedded model sees them: what a client names, and the text of a call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

Value = str | int | bool


class Parameter(NamedTuple):
    """A parameter's name and its JSON type, or the values it may take."""

    name: str
    kind: str | tuple[str, ...]
    is_required: bool = True

    def schema(self) -> dict[str, object]:
        return {"type": self.kind} if isinstance(self.kind, str) else {"type": "string", "enum": list(self.kind)}


class Tool(NamedTuple):
    """A function that a client can call; `topic` tells tools apart that would fit the same ask."""

    name: str
    parameters: tuple[Parameter, ...]
    topic: str

    def schema(self) -> dict[str, object]:
        """Return the tool as a client sends it in `tools`."""
        properties = {parameter.name: parameter.schema() for parameter in self.parameters}
        required = [parameter.name for parameter in self.parameters if parameter.is_required]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def line(self) -> str:
        """Return the chat template's line about the tool: its name, and the types of its parameters."""
        kinds = {name: kind if isinstance(kind, str) else list(kind) for name, kind, _ in self.parameters}
        return _json({"name": self.name, "parameters": kinds})


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Value]

    def text(self) -> str:
        """Return the call as the model writes it."""
        return f"<tool_call>\n{_json({'name': self.name, 'arguments': self.arguments})}\n</tool_call>"

    def message(self) -> dict[str, object]:
        """Return the call as an assistant's message has it for a chat template."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


def calls_text(calls: tuple[Call, ...]) -> str:
    return "\n".join(call.text() for call in calls)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
