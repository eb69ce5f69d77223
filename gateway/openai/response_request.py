"""Reads the bodies of /v1/responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Required

import orjson
from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, BodyType, JsonBody, check_nesting, shown
from gateway.openai.bodies import MAX_THINKING_TOKENS, PositiveInt, SamplingBody, Top
from gateway.openai.conversation import Conversation
from gateway.openai.foreign_fields import ECHOES, IGNORABLE, Ignored, Values, known_object, refused_by_names
from gateway.openai.limits import Limits
from gateway.openai.messages import Message
from gateway.openai.requests import NO_DETAILS, ChatRequest, TokenDetails, shared_fields
from gateway.openai.response_items import Item, read_items, read_messages
from gateway.openai.structured import AnswerFormat, read_text_format, text_format
from gateway.openai.template_variables import Effort, Kwargs, read_variables
from gateway.openai.tools import MAX_TOOLS, FunctionTool, ToolDefinition, ToolUse, read_tools

MAX_INCLUDED = 32
MAX_METADATA_PAIRS = 16  # pairs, as in OpenAI's API: a response repeats them
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


@with_config(EXACT)
class TextConfig(TypedDict, total=False):
    format: Annotated[AnswerFormat, text_format("text.format")] | None


@with_config(EXACT)
class ReasoningConfig(TypedDict, total=False):
    effort: Effort | None
    summary: Literal["auto", "concise", "detailed"] | None  # ignored: the whole reasoning is sent
    generate_summary: Literal["auto", "concise", "detailed"] | None


@with_config(EXACT)
class ResponseStreamOptions(TypedDict, total=False):
    include_obfuscation: bool | None


def _named(given: Any) -> Any:
    """The id of `{"id": ...}`, in which form OpenAI's API takes a conversation too."""
    return given["id"] if isinstance(given, dict) and [*given] == ["id"] else given


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA_PAIRS),
]


@with_config(EXACT)
class ResponsesBody(SamplingBody, total=False):
    input: Required[Any]
    instructions: str | None
    max_output_tokens: PositiveInt | None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    text: Annotated[TextConfig, known_object(TextConfig, "text.", ignorable={"verbosity": ("medium",)})] | None
    reasoning: Annotated[ReasoningConfig, known_object(ReasoningConfig, "reasoning.")] | None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None
    top_logprobs: Top | None
    truncation: Literal["auto", "disabled"] | None
    store: bool | None
    background: bool | None
    previous_response_id: str | None
    conversation: Annotated[str, BeforeValidator(_named)] | None
    metadata: Metadata | None
    stream_options: Annotated[ResponseStreamOptions, known_object(ResponseStreamOptions, "stream_options.")] | None
    # not OpenAI's
    chat_template_kwargs: Kwargs | None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_THINKING_TOKENS)] | None


_IGNORABLE: Mapping[str, Values] = {
    **{name: values for name, values in IGNORABLE.items() if name not in ResponsesBody.__optional_keys__},
    **dict.fromkeys(("access_programs", "client_metadata", "context_management", "image", "max_tool_calls"), ()),
}
_REFUSED: Mapping[str, Values | str] = {
    **refused_by_names(
        ResponsesBody.__annotations__,
        {
            "max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format",
            "structured_outputs": "text.format", "a message of the role system": "instructions",
        },
    ),
    "logprobs": "top_logprobs", "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens", "messages": "input", "n": (1,),
    "prompt": (), "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "structured_outputs": "text.format",
}  # fmt: skip
RESPONSES = BodyType[ResponsesBody](ResponsesBody, known_object(ResponsesBody, refused=_REFUSED, ignorable=_IGNORABLE))


@with_config(EXACT)
class ResponseTool(FunctionTool):
    type: Literal["function"]


_TOOL = BodyType[ResponseTool](ResponseTool, known_object(ResponseTool, "tools[].", echoes=ECHOES))


@dataclass(slots=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """A request whose answer is a response, made of items."""

    items: list[Item] = field(default_factory=list)  # of its input
    instructions: str = ""
    previous: str | None = None  # id of the preceding response
    stores: bool = True
    is_streamed: bool = False  # to the client; `stream` is also true in the background
    truncates: bool = False  # drop the oldest messages if the context is too short
    echoed: Mapping[str, Any] = field(default_factory=dict)  # fields of the request that the response repeats

    @property
    def is_in_background(self) -> bool:
        return bool(self.echoed["background"])

    @property
    def conversation_name(self) -> str | None:
        """The id of the stored conversation that it belongs to."""
        named: dict[str, str] | None = self.echoed["conversation"]
        return None if named is None else named["id"]


def parse_response_request(raw: JsonBody, limits: Limits) -> ResponseRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = RESPONSES.read(raw, ignored := limits.ignored())
    text, reasoning, included = body.get("text") or {}, body.get("reasoning") or {}, body.get("include") or ()
    top = body.get("top_logprobs")
    if top is None and LOGPROBS in included:
        top = 0
    for index, name in enumerate(included):
        if name not in (LOGPROBS, ENCRYPTED):
            _check_included(name, f"include[{index}]", ignored)
    items, instructions = read_items(body["input"]), body.get("instructions") or ""
    messages = with_instructions(instructions, read_messages(items, ignored))
    tools, functions = _read_tools(body, ignored)
    variables = read_variables(body.get("chat_template_kwargs"), None, reasoning.get("effort"))
    grammar = read_text_format(text.get("format"), "text.format")
    if body.get("background") and body.get("store") is False:
        raise BadRequest("background needs store: its answer is read from there. Leave store out.", "store")
    if body.get("conversation") is not None and body.get("previous_response_id") is not None:
        raise BadRequest(
            "conversation and previous_response_id exclude each other: a conversation has its turns already.",
            "previous_response_id",
        )
    shared = shared_fields(body, limits, grammar, body.get("max_output_tokens"), top)
    is_streamed = shared["stream"]
    shared["stream"] = is_streamed or bool(body.get("background"))
    return ResponseRequest(
        **shared,
        conversation=Conversation(
            messages,
            tools=tools,
            variables=variables,
            ignored=ignored,
            prompt_field="input",
            effort_field="reasoning.effort",
        ),
        details=NO_DETAILS if top is None else TokenDetails(top),
        length_field="max_output_tokens",
        ignored=ignored,
        thinking_budget=body.get("thinking_token_budget"),
        items=items,
        instructions=instructions,
        previous=body.get("previous_response_id"),
        stores=body.get("store") is not False,
        is_streamed=is_streamed,
        truncates=body.get("truncation") == "auto",
        echoed=_echoed(body, functions),
    )


def with_instructions(instructions: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages behind the instructions, which are joined with a leading system message."""
    if not instructions:
        return messages
    if messages and messages[0]["role"] == "system":
        instructions, messages = f"{instructions}\n\n{messages[0]['content']}", messages[1:]
    return ({"role": "system", "content": instructions}, *messages)


def _check_included(name: str, param: str, ignored: Ignored | None) -> None:
    if ignored is None:
        raise BadRequest(
            f"{param} must be {LOGPROBS} or {ENCRYPTED}, which this server can include, got {shown(name)}.", param
        )
    ignored.add("include[].", name, "include")


def _read_tools(body: ResponsesBody, ignored: Ignored | None) -> tuple[ToolUse | None, list[dict[str, Any]]]:
    """The functions among the tools, and the tools as the response repeats them.

    Tools that the server would run itself are ignored, or refused if unknown fields are.
    """
    functions, told, places = list[ToolDefinition](), list[dict[str, Any]](), list[str]()
    for index, tool in enumerate(body.get("tools") or ()):
        kind, place = tool.get("type"), f"tools[{index}]"
        if kind == "function":
            checked = _TOOL.checked(tool, ignored, ("tools", index))
            function: Any = {name: value for name, value in checked.items() if name != "type"}
            functions.append({"type": "function", "function": function})
            told.append({"parameters": {}, "strict": False, **checked})
            places.append(place)
        elif ignored is None or not isinstance(kind, str):
            raise BadRequest(
                f'{place}.type must be "function", the tools that clients run, got {shown(kind)}; this server runs '
                "none. Leave it out.",
                f"{place}.type",
            )
        else:
            ignored.add("tools[].", kind, "tools")
    return read_tools(functions, body.get("tool_choice"), body.get("parallel_tool_calls"), places), told


def _echoed(body: ResponsesBody, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The request fields that a response repeats."""
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    check_nesting(body.get("tool_choice") or (), param="tool_choice")
    parallel, conversation = body.get("parallel_tool_calls"), body.get("conversation")
    return {
        "background": body.get("background") or False,
        "conversation": None if conversation is None else {"id": conversation},
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": body.get("service_tier") or "default",
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": orjson.Fragment(orjson.dumps(functions)),  # which may be nested as deeply as the library writes
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
        "user": body.get("user"),
    }
