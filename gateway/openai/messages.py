"""The messages of a conversation: as clients send them, and as chat templates read them."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Required

import orjson
from pydantic import BeforeValidator, Field, ValidationInfo, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, MAX_FIELDS, check_nesting, shown
from gateway.openai.foreign_fields import (
    ECHOES,
    REFUSED_IN_MESSAGE,
    REFUSED_IN_PART,
    Ignored,
    known_object,
    says_nothing,
)

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 64
MAX_CALLS = 128  # in one message
MAX_CALL_ID_CHARS = 256

Message = Mapping[str, Any]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # of parts, by type
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # types of parts that no template reads


def text_content(place: str) -> BeforeValidator:
    """A validator that joins text parts into one text. `place` is the content's, for fields that are ignored."""

    def flatten(content: Any, info: ValidationInfo) -> Any:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            wanted = f"must be a string, or an array of text parts, got {shown(content)}"
            raise PydanticCustomError("content", wanted)
        if len(content) > MAX_CONTENT_PARTS:
            raise PydanticCustomError("content", "must hold at most {limit} parts", {"limit": MAX_CONTENT_PARTS})
        return "".join(_part_text(place, index, part, info.context) for index, part in enumerate(content))

    return BeforeValidator(flatten)


def _part_text(place: str, index: int, part: Any, ignored: Ignored | None) -> str:
    if type(part) is str:
        return part
    if type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str:
        return part["text"]  # type: ignore[no-any-return]
    if type(part) is not dict:
        raise _wrong_part(f"must be a text or an object, got {shown(part)}", index)
    if len(part) > MAX_FIELDS:
        raise _wrong_part(f"must hold at most {MAX_FIELDS} fields", index)
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXTS:
        if isinstance(kind, str) and kind in _THOUGHTS:
            return ""
        complaint = (
            f"is not supported here: this server reads texts, got a part of the type {shown(kind)}; leave it out"
        )
        raise _wrong_part(complaint, index, kind if isinstance(kind, str) and kind in part else "type")
    field = _TEXTS[kind]
    _check_beside(place, index, part, field, ignored)
    text = part.get(field)
    if type(text) is not str:
        raise _wrong_part(f"must be a string, got {shown(text)}" if field in part else "is required", index, field)
    return text


def _check_beside(place: str, index: int, part: Mapping[str, Any], field: str, ignored: Ignored | None) -> None:
    """Check the fields of a part beside its type and its text."""
    for name, value in part.items():
        if name in ("type", field) or name in ECHOES or says_nothing(value):
            continue
        if name in REFUSED_IN_PART:
            raise _wrong_part("is not supported here: this server reads texts; leave it out", index, name)
        if name in _TEXTS.values() or ignored is None:
            raise _wrong_part("is not a field that this server knows of a part of this type", index, name)
        ignored.add(f"{place}[].", name)


def _wrong_part(complaint: str, index: int, *field: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", complaint, {"field": (index, *field)})


@with_config(EXACT)
class CalledFunction(TypedDict, total=False):
    name: Required[str]
    arguments: Any  # as the model wrote them: any text
    parsed_arguments: Any  # openai's client parses them and sends both back


@with_config(EXACT)
class MessageCall(TypedDict, total=False):
    id: Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)] | None
    type: Literal["function"] | None
    function: Required[
        Annotated[CalledFunction, known_object(CalledFunction, "messages[].tool_calls[].function.", echoes=ECHOES)]
    ]


_MessageCall = Annotated[MessageCall, known_object(MessageCall, "messages[].tool_calls[].", echoes=ECHOES - {"id"})]


@with_config(EXACT)
class ChatMessage(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: Annotated[str | None, text_content("messages[].content")]
    name: str | None
    tool_calls: Annotated[list[_MessageCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None
    tool_call_id: Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)] | None
    reasoning_content: str | None
    reasoning: str | None  # as vLLM calls it too
    refusal: str | None  # in place of content
    parsed: Any  # the content, parsed by openai's client


_Message = Annotated[ChatMessage, known_object(ChatMessage, "messages[].", refused=REFUSED_IN_MESSAGE, echoes=ECHOES)]
Messages = Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def template_messages(messages: Iterable[ChatMessage]) -> tuple[Message, ...]:
    """The messages as chat templates read them: arguments of calls as objects, and results of calls with the function's
    name.

    Raises `BadRequest` for a message without content, unless it is an answer with calls.
    """
    names: dict[str, str] = {}  # of functions, by the ids of calls
    return tuple([_template_message(f"messages[{index}]", message, names) for index, message in enumerate(messages)])


def _template_message(param: str, message: ChatMessage, names: dict[str, str]) -> Message:
    """Returns a message with content; `developer`, as newer clients say, becomes `system`."""
    role, content, name = message["role"], message.get("content"), message.get("name")
    if content is None and role not in ("assistant", "tool"):
        raise BadRequest(f"{param}.content is required: a string, or an array of text parts.", f"{param}.content")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if role == "tool":
        call_id = message.get("tool_call_id")
        if call_id is None:
            raise BadRequest(
                f"{param}.tool_call_id is required: the id of the call whose result the message is.",
                f"{param}.tool_call_id",
            )
        read["tool_call_id"] = call_id
        name = name or names.get(call_id)
    if name is not None:
        read["name"] = name
    if role == "assistant":
        read["content"] = content or message.get("refusal") or ""
        _add_answer(read, param, message, names)
    elif message.get("tool_calls"):
        raise BadRequest(
            f"{param}.tool_calls is of an assistant's messages, and this one's role is {role}.", f"{param}.tool_calls"
        )
    return read


def _add_answer(read: dict[str, Any], param: str, message: ChatMessage, names: dict[str, str]) -> None:
    """Add an assistant's calls and reasoning."""
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        read["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if not calls:
        return
    read["tool_calls"] = []
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = object_of(function.get("arguments"), f"{param}.tool_calls[{number}].function.arguments")
        told = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if (call_id := call.get("id")) is not None:
            told["id"] = call_id
            names[call_id] = function["name"]
        read["tool_calls"].append(told)


def object_of(arguments: Any, param: str) -> Any:
    """The object that arguments spell, {} for any other value; malformed, cut or deeply nested text stays text. Raises
    `BadRequest` about `param`.
    """
    read = arguments
    try:
        if isinstance(arguments, str):
            read = orjson.loads(arguments.strip() or "{}")
        if not isinstance(read, dict):
            return {}
        check_nesting(read, param=param)
    except (orjson.JSONDecodeError, BadRequest):
        if not isinstance(arguments, str):
            raise
        return arguments
    return read


def message_size(message: Message) -> int:
    """The characters of a message, approximately."""
    size = len(message["content"]) + len(message.get("reasoning_content", ""))
    for call in message.get("tool_calls", ()):
        size += len(call["function"]["name"]) + _size(call["function"]["arguments"])
    return size


def _size(arguments: Any) -> int:
    return len(arguments) if isinstance(arguments, str) else len(orjson.dumps(arguments))
