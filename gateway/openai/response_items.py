"""The input of a response: items as clients send them, converted to messages.

A turn of the assistant is several items: its reasoning, its text and each of its calls. Chat templates read one
message.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, BodyType, shown
from gateway.openai.foreign_fields import ECHOES, REFUSED_IN_MESSAGE, Ignored, Values, known_object
from gateway.openai.messages import MAX_CALL_ID_CHARS, MAX_MESSAGES, Message, object_of, text_content

ITEM_ECHOES = ECHOES | {"agent", "async", "caller", "name", "namespace", "parsed_arguments", "phase", "type"}

_CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARS)]


@with_config(EXACT)
class MessageItem(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant"]]
    content: Required[Annotated[str, text_content("input[].content")]]


@with_config(EXACT)
class CallItem(TypedDict, total=False):
    call_id: Required[_CallId]
    name: Required[str]
    arguments: Any  # as a model has written them, which may be anything


@with_config(EXACT)
class CallOutputItem(TypedDict, total=False):
    call_id: Required[_CallId]
    output: Required[Annotated[str, text_content("input[].output")]]


@with_config(EXACT)
class ReasoningText(TypedDict, total=False):
    type: Required[Literal["reasoning_text"]]
    text: Required[str]


@with_config(EXACT)
class ReasoningItem(TypedDict, total=False):
    summary: Any
    content: list[ReasoningText] | None
    encrypted_content: str | None


_REFUSED: Mapping[str, Values | str] = {
    **REFUSED_IN_MESSAGE, **dict.fromkeys(("function_call", "tool_calls"), "items of the type function_call")
}  # fmt: skip


def _item(form: Any, echoes: frozenset[str]) -> BodyType[Any]:
    known = known_object(form, "input[].", refused=_REFUSED, echoes=echoes - form.__required_keys__)
    return BodyType[Any](form, known)


_FORMS: Mapping[str, BodyType[Any]] = {
    "message": _item(MessageItem, ITEM_ECHOES),
    "function_call": _item(CallItem, ITEM_ECHOES),
    "function_call_output": _item(CallOutputItem, ITEM_ECHOES),
    "reasoning": _item(ReasoningItem, ITEM_ECHOES),
}


Item = dict[str, Any]

REFERENCE = "item_reference"
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
OUTPUT_ORDINAL = 0x8000  # ordinals from here on are output items


def item_id(kind: str, response: str, ordinal: int) -> str:
    """The id of an item, which contains the id of its response."""
    return f"{_ID_PREFIXES[kind]}_{response.removeprefix('resp_')}{ordinal:04x}"


def read_items(given: Any) -> list[Item]:
    """Returns the items of an input, each with its type. Raises `BadRequest`."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_MESSAGES:
        wanted = f"a string, or an array of 1 to {MAX_MESSAGES} items"
        raise BadRequest(f"input must be {wanted}, got {shown(given)}.", "input")
    return typed_items(given, "input")


def typed_items(given: list[Any], field: str) -> list[Item]:
    """The items of this field of a body, each with its type. Raises `BadRequest`."""
    items: list[Item] = []
    for index, item in enumerate(given):
        param = f"{field}[{index}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{param} must be an object, got {shown(item)}.", param)
        kind = item.get("type") or ("message" if "role" in item else REFERENCE if "id" in item else None)
        known = ", ".join(_FORMS)
        if kind is None:
            raise BadRequest(f"{param}.type is required: one of {known}.", f"{param}.type")
        if kind == REFERENCE and not isinstance(item.get("id"), str):
            raise BadRequest(f"{param}.id must be the id of an item, got {shown(item.get('id'))}.", f"{param}.id")
        if not isinstance(kind, str) or kind not in (*_FORMS, REFERENCE):
            wanted = f"must be one of {known}, which this server reads"
            raise BadRequest(f"{param}.type {wanted}, got {shown(kind)}.", f"{param}.type")
        items.append({**item, "type": kind})
    return items


def read_messages(items: Iterable[Item], ignored: Ignored | None, field: str = "input") -> tuple[Message, ...]:
    """The messages of the items in this field; references to others are left out. Raises `BadRequest`."""
    turns = _Turns()
    for index, item in enumerate(items):
        if (kind := item["type"]) != REFERENCE:
            turns.add(kind, f"{field}[{index}]", _FORMS[kind].checked(item, ignored, (field, index)))
    turns.end()
    return tuple(turns.messages)


class _Turns:
    """Collects the messages of a conversation, item by item."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []  # of the assistant's next turn
        self._names: dict[str, str] = {}  # of functions, by the ids of calls

    def add(self, kind: str, place: str, item: Mapping[str, Any]) -> None:
        match kind:
            case "message":
                self._add_message(item["role"], item["content"])
            case "reasoning":
                self._reasoning += [part["text"] for part in item.get("content") or ()]
            case "function_call":
                arguments = object_of(item.get("arguments"), f"{place}.arguments")
                self._add_call(item["call_id"], {"name": item["name"], "arguments": arguments})
            case _:
                self._add_output(item["call_id"], item["output"])

    def end(self) -> None:
        """Add reasoning that no text or call followed."""
        if self._reasoning:
            self._turn()

    def _add_message(self, role: str, content: str) -> None:
        if role == "assistant":
            self._turn()["content"] += content
            return
        self.end()
        self.messages.append({"role": "system" if role == "developer" else role, "content": content})

    def _turn(self) -> dict[str, Any]:
        """The message of the assistant's turn, which ends when another role speaks."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        turn = self.messages[-1]
        if self._reasoning:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(self._reasoning)
            self._reasoning = []
        return turn

    def _add_call(self, call_id: str, function: Mapping[str, Any]) -> None:
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"type": "function", "function": function, "id": call_id})
        self._names[call_id] = function["name"]

    def _add_output(self, call_id: str, output: str) -> None:
        self.end()
        message = {"role": "tool", "content": output, "tool_call_id": call_id}
        if (name := self._names.get(call_id)) is not None:
            message["name"] = name
        self.messages.append(message)
