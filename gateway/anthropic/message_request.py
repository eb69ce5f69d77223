"""Reads the bodies of Anthropic's /v1/messages and /v1/messages/count_tokens.

The API: https://docs.claude.com/en/api/messages.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Required, cast

from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict  # as in `gateway.openai.bodies`

from backend.sampling_params import MAX_STOP_CHARS, MAX_STOPS
from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, BodyType, JsonBody, shown
from gateway.openai.bodies import MAX_SALT_CHARS, MAX_THINKING_TOKENS, PositiveInt, SamplingBody
from gateway.openai.conversation import Conversation
from gateway.openai.foreign_fields import ECHOES, IGNORABLE, Ignored, Values, known_object, refused_by_names
from gateway.openai.limits import Limits
from gateway.openai.messages import (
    MAX_CALL_ID_CHARS,
    MAX_CALLS,
    MAX_MESSAGES,
    Message,
    object_of,
    text_content,
)
from gateway.openai.requests import ChatRequest, shared_fields
from gateway.openai.structured import AnswerFormat, read_text_format, text_format
from gateway.openai.template_variables import Effort, Kwargs, read_variables
from gateway.openai.tools import MAX_TOOLS, FunctionTool, ToolDefinition, ToolUse, read_tools

MAX_BLOCKS = MAX_CALLS + 64  # in one message

SHORT_MARK_S, HOUR_MARK_S = 300.0, 3600.0  # `cache_control`'s ttl "5m", which is the default, and "1h"
_CACHE_MARK = re.compile(rb'"cache_control"\s*:\s*\{([^{}]{0,80})\}')

_Id = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARS)]
_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_SYSTEM: BeforeValidator = text_content("system")


@with_config(EXACT)
class Thinking(TypedDict, total=False):
    type: Required[Literal["enabled", "disabled", "adaptive"]]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_THINKING_TOKENS)] | None
    display: Literal["summarized", "omitted"] | None


@with_config(EXACT)
class OutputConfig(TypedDict, total=False):
    format: Annotated[AnswerFormat, text_format("output_config.format")] | None
    effort: Effort | None


@with_config(EXACT)
class GivenMessage(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: Any  # a text, or blocks


_Message = Annotated[GivenMessage, known_object(GivenMessage, "messages[].", echoes=ECHOES)]


@with_config(EXACT)
class CountBody(TypedDict, total=False):
    """The fields that make up a prompt."""

    model: Required[str]
    messages: Required[Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]]
    system: Annotated[str | None, _SYSTEM]
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    tool_choice: Any
    thinking: Annotated[Thinking, known_object(Thinking, "thinking.")] | None
    output_config: Annotated[OutputConfig, known_object(OutputConfig, "output_config.")] | None
    output_format: Annotated[AnswerFormat, text_format("output_format")] | None  # as `output_config.format`, of a beta
    chat_template_kwargs: Kwargs | None  # not Anthropic's


@with_config(EXACT)
class MessagesBody(CountBody, total=False):
    max_tokens: Required[PositiveInt]
    stream: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop_sequences: Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    metadata: dict[str, Any] | None
    service_tier: Literal["auto", "standard_only"] | None
    cache_control: Any
    # not Anthropic's
    seed: int | None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None


_IGNORABLE: Mapping[str, Values] = {
    **{name: values for name, values in IGNORABLE.items() if name not in MessagesBody.__annotations__},
    **dict.fromkeys(("container", "context_management", "inference_geo"), ()),
}
_REFUSED: Mapping[str, Values | str] = {
    **refused_by_names(
        MessagesBody.__annotations__,
        {
            "response_format": "output_config.format", "structured_outputs": "output_config.format",
            "a message of the role system": "system",
        },
    ),
    "max_completion_tokens": "max_tokens", "mcp_servers": ([],), "n": (1,), "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format", "stop": "stop_sequences", "structured_outputs": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}  # fmt: skip
MESSAGES = BodyType[MessagesBody](MessagesBody, known_object(MessagesBody, refused=_REFUSED, ignorable=_IGNORABLE))
COUNT = BodyType[CountBody](
    CountBody,
    known_object(
        CountBody,
        refused=_REFUSED,
        ignorable={**_IGNORABLE, **dict.fromkeys(MessagesBody.__annotations__.keys() - CountBody.__annotations__, ())},
    ),
)


@with_config(EXACT)
class TextBlock(TypedDict):
    text: str


@with_config(EXACT)
class ThinkingBlock(TypedDict, total=False):
    thinking: Required[str]
    signature: str | None


@with_config(EXACT)
class RedactedBlock(TypedDict, total=False):
    data: Any  # encrypted for another server


@with_config(EXACT)
class ToolUseBlock(TypedDict, total=False):
    id: Required[_Id]
    name: Required[str]
    input: Any  # of a call that was cut, a text


@with_config(EXACT)
class ToolResultBlock(TypedDict, total=False):
    tool_use_id: Required[_Id]
    content: Annotated[str | None, text_content("messages[].content[].content")]


def _block(form: Any) -> BodyType[Any]:
    echoes = (ECHOES | {"caller", "type"}) - form.__required_keys__
    return BodyType[Any](form, known_object(form, "messages[].content[].", echoes=echoes))


_FORMS: Mapping[str, Mapping[str, BodyType[Any]]] = {
    "user": {"text": _block(TextBlock), "tool_result": _block(ToolResultBlock)},
    "system": {"text": _block(TextBlock)},
    "assistant": {
        "text": _block(TextBlock),
        "thinking": _block(ThinkingBlock),
        "redacted_thinking": _block(RedactedBlock),
        "tool_use": _block(ToolUseBlock),
    },
}


@with_config(EXACT)
class MessageTool(TypedDict, total=False):
    name: Required[str]
    description: str | None
    input_schema: Required[dict[str, Any]]
    strict: bool | None


_TOOL_ECHOES = ECHOES | {
    "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples", "type"
}  # fmt: skip
_TOOL = BodyType[MessageTool](MessageTool, known_object(MessageTool, "tools[].", echoes=_TOOL_ECHOES))
_FUNCTION = BodyType[FunctionTool](FunctionTool)


def parse_message_request(raw: JsonBody, limits: Limits) -> ChatRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = MESSAGES.read(raw, ignored := limits.ignored())
    thinking: Any = (_thinks(body) and body.get("thinking")) or {}
    asked, field = (body.get("output_config") or {}).get("format"), "output_config.format"
    if asked is None:
        asked, field = body.get("output_format"), "output_format"
    sampling: Any = {
        "model": body["model"],
        "stop": [text for text in body.get("stop_sequences") or () if text],
        "service_tier": "default" if body.get("service_tier") == "standard_only" else body.get("service_tier"),
        **{name: body.get(name) for name in ("stream", "temperature", "top_p", "top_k", "seed", "cache_salt")},
    }
    metadata = body.get("metadata") or {}
    sampling |= {"metadata": metadata, "user": user if isinstance(user := metadata.get("user_id"), str) else None}
    grammar = read_text_format(asked, field)
    return ChatRequest(
        **shared_fields(cast(SamplingBody, sampling), limits, grammar, body["max_tokens"]),
        conversation=_conversation(body, ignored),
        continuous_usage=True,  # a message begins with its usage
        ignored=ignored,
        shows_reasoning=bool(thinking) and thinking.get("display") != "omitted",
        thinking_budget=thinking.get("budget_tokens"),
        cached_for=_cached_for(raw.raw),
    )


def _cached_for(body: bytes) -> float | None:
    """The longest time of the marks for caches, in seconds. They may stand at any block, as in no text: there, quotes
    are escaped. A property of this name in a schema, or in a call's input, is none.
    """
    found = _CACHE_MARK.findall(body) if b'"cache_control"' in body else ()
    marks = [mark for mark in found if b'"ephemeral"' in mark]
    return max([HOUR_MARK_S if b'"1h"' in mark else SHORT_MARK_S for mark in marks], default=None)


class CountRequest(NamedTuple):
    """A request to count the tokens of a conversation."""

    model: str
    conversation: Conversation
    ignored: Ignored | None


def parse_count_request(raw: JsonBody, limits: Limits) -> CountRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = COUNT.read(raw, ignored := limits.ignored())
    return CountRequest(body["model"], _conversation(body, ignored), ignored)


def _thinks(body: CountBody) -> bool:
    thinking = body.get("thinking")
    return thinking is not None and thinking["type"] != "disabled"


def _conversation(body: CountBody, ignored: Ignored | None) -> Conversation:
    messages = _read_messages(body["messages"], ignored)
    if body.get("system"):
        messages = [{"role": "system", "content": body["system"]}, *messages]
    last = messages[-1]
    goes_on = last["role"] == "assistant" and last["content"] != "" and not last.get("tool_calls")
    if last == {"role": "assistant", "content": ""} and len(messages) > 1:
        messages.pop()  # an empty prefill
    effort = (body.get("output_config") or {}).get("effort") if _thinks(body) else "none"
    return Conversation(
        tuple(messages),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        tools=_read_tools(body, ignored),
        variables=read_variables(body.get("chat_template_kwargs"), None, effort),
        ignored=ignored,
        prompt_field="messages",
        effort_field="output_config.effort",
    )


def _read_messages(given: Iterable[GivenMessage], ignored: Ignored | None) -> list[Message]:
    messages, names = list[Message](), dict[str, str]()
    for index, message in enumerate(given):
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        place = f"messages[{index}].content"
        if not isinstance(content, list) or len(content) > MAX_BLOCKS:
            raise BadRequest(
                f"{place} must be a string, or an array of at most {MAX_BLOCKS} blocks, got {shown(content)}.", place
            )
        blocks = [_read_block(role, (index, number), block, ignored) for number, block in enumerate(content)]
        for one in _user_turn(role, blocks, names) if role != "assistant" else [_assistant_turn(blocks, names)]:
            if messages and one["role"] == messages[-1]["role"] != "tool":  # turns of one role are one
                messages[-1] = _joined(messages[-1], one)
            else:
                messages.append(one)
    return messages


def _joined(one: Message, other: Message) -> Message:
    joined = {**one, **other, "content": "\n\n".join(filter(None, (one["content"], other["content"])))}
    if calls := [*one.get("tool_calls", ()), *other.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if reasoning := one.get("reasoning_content", "") + other.get("reasoning_content", ""):
        joined["reasoning_content"] = reasoning
    return joined


def _read_block(role: str, place: tuple[int, int], block: Any, ignored: Ignored | None) -> tuple[str, Any]:
    """Returns the type of a block, and the block."""
    path = f"messages[{place[0]}].content[{place[1]}]"
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _FORMS[role]:
        known = ", ".join(_FORMS[role])
        raise BadRequest(
            f"{path} must be a block of a type that this server reads in a message of this role, {known}, got "
            f"{shown(kind if isinstance(block, dict) else block)}.",
            f"{path}.type" if isinstance(block, dict) else path,
        )
    checked = _FORMS[role][kind].checked(block, ignored, ("messages", place[0], "content", place[1]))
    if kind == "tool_use":
        checked["input"] = object_of(checked.get("input"), f"{path}.input")
    return kind, checked


def _user_turn(role: str, blocks: list[tuple[str, Any]], names: Mapping[str, str]) -> list[Message]:
    """Returns the messages of a turn: each result of a tool is one, and the texts between them."""
    messages: list[dict[str, Any]] = []
    for kind, block in blocks:
        if kind == "tool_result":
            call_id = block["tool_use_id"]
            told = {"role": "tool", "content": block.get("content") or "", "tool_call_id": call_id}
            messages.append(told | ({"name": names[call_id]} if call_id in names else {}))
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += block["text"]
        else:
            messages.append({"role": role, "content": block["text"]})
    return list(messages) or [{"role": role, "content": ""}]


def _assistant_turn(blocks: list[tuple[str, Any]], names: dict[str, str]) -> Message:
    content, reasoning = ("".join([block[kind] for of, block in blocks if of == kind]) for kind in ("text", "thinking"))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    for kind, block in blocks:
        if kind == "tool_use":
            names[block["id"]] = block["name"]
            function = {"name": block["name"], "arguments": block["input"]}
            calls = message.setdefault("tool_calls", [])
            calls.append({"type": "function", "function": function, "id": block["id"]})
    return message


def _read_tools(body: CountBody, ignored: Ignored | None) -> ToolUse | None:
    """The tools that clients run.

    Tools that Anthropic's server runs are ignored, or refused if unknown fields are.
    """
    tools, places = list[ToolDefinition](), list[str]()
    for index, given in enumerate(body.get("tools") or ()):
        kind = given.get("type") or "custom"
        if kind == "custom":
            tool = _TOOL.checked(given, ignored, ("tools", index))
            function = {"parameters": tool["input_schema"], **{k: v for k, v in tool.items() if k != "input_schema"}}
            tools.append({"type": "function", "function": _FUNCTION.checked(function, ignored, ("tools", index))})
            places.append(f"tools[{index}]")
        elif ignored is None or not isinstance(kind, str):
            raise BadRequest(
                f'tools[{index}].type must be "custom", the tools that clients run, got {shown(kind)}; this server '
                "runs none. Leave it out.",
                f"tools[{index}].type",
            )
        else:
            ignored.add("tools[].", kind, "tools")
    choice, is_parallel = _read_choice(body.get("tool_choice"))
    return read_tools(tools, choice, is_parallel, places, "input_schema")


def _read_choice(choice: Any) -> tuple[Any, bool]:
    """OpenAI's form of a choice, and True if several tools may be called."""
    match choice:
        case None:
            return None, True
        case {"type": "auto" | "any" | "none" as kind, **rest} if _is_known(rest):
            return {"any": "required"}.get(kind, kind), rest.get("disable_parallel_tool_use") is not True
        case {"type": "tool", "name": str(name), **rest} if _is_known(rest):
            return {"type": "function", "name": name}, False
    raise BadRequest(
        'tool_choice must be {"type": "auto"}, "any" or "none" in its place, or {"type": "tool", "name": string}, got '
        f"{shown(choice)}.",
        "tool_choice",
    )


def _is_known(rest: Mapping[Any, Any]) -> bool:
    """True if the rest of a choice has known fields only."""
    return rest.keys() <= {"disable_parallel_tool_use"} and isinstance(
        rest.get("disable_parallel_tool_use"), bool | None
    )
