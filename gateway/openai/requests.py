"""Reads the requests of the OpenAI API: their JSON bodies as they arrive, and the checked values that come of them.

A body may have the extras that vLLM's clients send through `extra_body`. A field is declared with the type it must
have, or named as neutral if it is not supported yet and only values that change nothing are accepted; any other field
is refused by name. Counts are bounded, so that a body of any allowed size is cheap to refuse.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # before Python 3.12 typing's does not say of which base each field is

from backend.errors import InvalidRequest
from backend.sampling_params import MAX_STOPS, SamplingParams
from gateway.errors import BadRequest, context_exceeded, translate
from gateway.http.json_body import EXACT, MAX_FIELDS, BodyType, JsonBody, json_object, shown

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 64
MAX_PROMPTS = MAX_ANSWERS = 128  # in one request
MAX_SALT = 256  # characters

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Prompt = str | tuple[int, ...]


def _flatten_content(content: Any) -> Any:
    """Returns the concatenation of text parts; other content is returned as it is, to be validated."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_CONTENT_PARTS:
        raise PydanticCustomError("content", "must hold at most {limit} parts", {"limit": MAX_CONTENT_PARTS})
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str:
        return part["text"]  # type: ignore[no-any-return]
    raise PydanticCustomError("content", 'must be a string or an array of parts {"type": "text", "text": string}')


def _one_or_many(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


@with_config(EXACT)
class ChatMessage(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant"]]
    content: Annotated[str | None, BeforeValidator(_flatten_content)]
    name: str | None


# what the answers of this API hold, so that a client may send them back
_OF_ANSWERS: Mapping[str, Sequence[Any]] = {
    "refusal": (),
    "annotations": [[]],
    "audio": (),
    "function_call": (),
    "tool_calls": [[]],
}
_Message = Annotated[ChatMessage, json_object(_OF_ANSWERS)]
_Messages = Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
_PositiveInt = Annotated[int, Field(ge=1)]


@with_config(EXACT)
class StreamOptions(TypedDict, total=False):
    include_usage: bool | None
    continuous_usage_stats: bool | None  # vLLM's


@with_config(EXACT)
class GenerationBody(TypedDict, total=False):
    """The body that both dialects share. A field that was not sent is absent; null stands for that as well."""

    model: Required[str]
    stream: bool | None
    stream_options: Annotated[StreamOptions, json_object({"include_obfuscation": [False]})] | None
    max_tokens: _PositiveInt | None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None, BeforeValidator(_one_or_many)
    ]
    # vLLM's
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    add_special_tokens: bool | None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None
    # about the request, without effect on its answer
    service_tier: Tier | None
    user: str | None
    metadata: Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)] | None
    safety_identifier: str | None
    prompt_cache_key: str | None


_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": [1], "logit_bias": [{}], "store": [False], "response_format": [{"type": "text"}],
    "structured_outputs": (), "prompt_logprobs": (), "truncate_prompt_tokens": (), "use_beam_search": [False],
    "length_penalty": [1, 1.0], "spaces_between_special_tokens": [True], "priority": [0],
}  # fmt: skip


@with_config(EXACT)
class ChatBody(GenerationBody, total=False):
    messages: Required[_Messages]
    max_completion_tokens: _PositiveInt | None
    add_generation_prompt: bool | None


NEUTRAL_IN_CHAT: Mapping[str, Sequence[Any]] = {
    **_NEUTRAL, "logprobs": [False], "top_logprobs": [0], "tools": [[]],
    "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "functions": [[]],
    "function_call": ["none", "auto"], "modalities": [["text"]], "audio": (), "prediction": (), "moderation": (),
    "prompt_cache_options": (), "prompt_cache_retention": ["in_memory"], "reasoning_effort": ["none"],
    "verbosity": ["medium"], "web_search_options": (), "chat_template": (), "chat_template_kwargs": [{}],
    "continue_final_message": [False], "documents": [[]], "echo": [False],
}  # fmt: skip


@with_config(EXACT)
class CompletionBody(GenerationBody, total=False):
    prompt: Required[Any]


NEUTRAL_IN_COMPLETION = {**_NEUTRAL, "logprobs": (), "echo": [False], "suffix": [""]}


@with_config(EXACT)
class TokenizeBody(TypedDict, total=False):
    model: str | None
    prompt: str | None
    messages: _Messages | None
    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    return_token_strs: bool | None


_NEUTRAL_IN_TOKENIZE: Mapping[str, Sequence[Any]] = {
    "chat_template": (),
    "chat_template_kwargs": [{}],
    "continue_final_message": [False],
    "tools": [[]],
}


@with_config(EXACT)
class DetokenizeBody(TypedDict, total=False):
    model: str | None
    tokens: Required[Any]


_CHAT = BodyType[ChatBody](ChatBody, NEUTRAL_IN_CHAT)
_COMPLETION = BodyType[CompletionBody](CompletionBody, NEUTRAL_IN_COMPLETION)
_TOKENIZE = BodyType[TokenizeBody](TokenizeBody, _NEUTRAL_IN_TOKENIZE)
_DETOKENIZE = BodyType[DetokenizeBody](DetokenizeBody)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that a request is checked against before it is tokenized, and the model's defaults for sampling."""

    vocab_size: int
    max_model_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams, the model's own


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """The part of a request that both dialects share: how to sample tokens, and how to answer."""

    model: str
    sampling: SamplingParams
    stream: bool
    include_usage: bool  # a last chunk with the usage of the stream
    continuous_usage: bool  # and in every other chunk the usage of its choice so far
    include_stop: bool  # the stop string stays in the text
    skip_special_tokens: bool
    add_special_tokens: bool  # when the prompt is encoded
    service_tier: Tier | None
    user: str | None
    num_answers: int = 1  # to each prompt
    cache_salt: str | None = None  # its blocks are shared only with requests that have the same
    length_field: str = "max_tokens"  # the one that bounds the answer


@dataclass(slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    messages: tuple[Mapping[str, str], ...]  # role, content and perhaps name, as chat templates read them
    add_generation_prompt: bool


@dataclass(slots=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    prompts: tuple[Prompt, ...]  # at least one; a text may still encode to no token


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A request to tokenize either `prompt` or `messages`; one of them is set."""

    model: str | None
    prompt: str | None
    messages: tuple[Mapping[str, str], ...] | None
    add_generation_prompt: bool
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str | None
    tokens: tuple[int, ...]


def parse_chat_request(raw: JsonBody, limits: Limits) -> ChatRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = _CHAT.read(raw)
    return ChatRequest(
        messages=_template_messages(body["messages"]),
        **_shared(body, limits, body.get("max_completion_tokens"), add_special_tokens=False),
        add_generation_prompt=_default(body.get("add_generation_prompt"), True),
    )


def parse_completion_request(raw: JsonBody, limits: Limits) -> CompletionRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = _COMPLETION.read(raw)
    request = CompletionRequest(
        **_shared(body, limits, None, add_special_tokens=True),
        prompts=_prompts(body["prompt"], limits),
    )
    if request.num_answers * len(request.prompts) > MAX_ANSWERS:
        raise BadRequest(
            f"A request may have {MAX_ANSWERS} answers, got n = {request.num_answers} for each of "
            f"{len(request.prompts)} prompts; lower n or send fewer prompts.",
            "n",
        )
    return request


def parse_tokenize_request(raw: JsonBody) -> TokenizeRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = _TOKENIZE.read(raw)
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("Send either prompt or messages.", "prompt")
    return TokenizeRequest(
        model=body.get("model"),
        prompt=prompt,
        messages=None if messages is None else _template_messages(messages),
        add_generation_prompt=_default(body.get("add_generation_prompt"), True),
        add_special_tokens=_default(body.get("add_special_tokens"), messages is None),
        return_token_strs=_default(body.get("return_token_strs"), False),
    )


def parse_detokenize_request(raw: JsonBody, limits: Limits) -> DetokenizeRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = _DETOKENIZE.read(raw)
    return DetokenizeRequest(model=body.get("model"), tokens=_token_ids(body["tokens"], "tokens", limits))


def _shared(
    body: GenerationBody, limits: Limits, max_completion_tokens: int | None, add_special_tokens: bool
) -> dict[str, Any]:
    options, stream, max_tokens = body.get("stream_options"), bool(body.get("stream")), body.get("max_tokens")
    if options is not None and not stream:
        raise BadRequest("stream_options is only allowed when stream is true.", "stream_options")
    # the larger of two token limits counts, as for a quota
    is_newer = (max_completion_tokens or 0) > (max_tokens or 0)
    include_usage = options is not None and bool(options.get("include_usage"))
    return {
        "model": body["model"],
        "sampling": _sampling(body, limits, max_completion_tokens if is_newer else max_tokens),
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": options is not None and include_usage and bool(options.get("continuous_usage_stats")),
        "include_stop": _default(body.get("include_stop_str_in_output"), False),
        "skip_special_tokens": _default(body.get("skip_special_tokens"), True),
        "add_special_tokens": _default(body.get("add_special_tokens"), add_special_tokens),
        "service_tier": body.get("service_tier"),
        "user": body.get("user"),
        "num_answers": body.get("n") or 1,
        "cache_salt": body.get("cache_salt"),
        "length_field": "max_completion_tokens" if is_newer else "max_tokens",
    }


_SAMPLING_FIELDS = {
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos",
}  # fmt: skip


def _sampling(body: GenerationBody, limits: Limits, max_tokens: int | None) -> SamplingParams:
    """Returns the sampling parameters; null stands for the default, which the model may set."""
    given = {name: value for name, value in body.items() if name in _SAMPLING_FIELDS and value is not None}
    stop_token_ids = tuple(body.get("stop_token_ids") or ())
    if stop_token_ids:
        _check_in_vocabulary(stop_token_ids, "stop_token_ids", limits)
    try:
        return _checked(
            **{**limits.sampling_defaults, **given},
            max_tokens=max_tokens,
            stop=tuple(body.get("stop") or ()),
            stop_token_ids=stop_token_ids,
        )
    except InvalidRequest as exc:
        raise translate(exc) from exc


@lru_cache(maxsize=64, typed=True)
def _checked(**fields: Any) -> SamplingParams:
    """Returns checked parameters from a cache: clients seldom change how they sample."""
    return SamplingParams(**fields)


def _template_messages(messages: Iterable[ChatMessage]) -> tuple[dict[str, str], ...]:
    """Returns the messages as chat templates read them. Raises `BadRequest` for one without content, which only an
    assistant's may lack, since an answer can.
    """
    return tuple([_template_message(index, message) for index, message in enumerate(messages)])


def _template_message(index: int, message: ChatMessage) -> dict[str, str]:
    """Returns a message with content; `developer`, as newer clients say, becomes `system`."""
    role, content, name = message["role"], message.get("content"), message.get("name")
    if content is None and role != "assistant":
        param = f"messages[{index}].content"
        raise BadRequest(f"{param} is required: a string, or an array of text parts.", param)
    read = {"role": "system" if role == "developer" else role, "content": content or ""}
    return read if name is None else {**read, "name": name}


def _prompts(prompt: Any, limits: Limits) -> tuple[Prompt, ...]:
    if not isinstance(prompt, list) or (prompt and type(prompt[0]) is int):
        return (_prompt(prompt, "prompt", limits),)
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must hold between 1 and {MAX_PROMPTS} prompts, got {len(prompt)}.", "prompt")
    return tuple(_prompt(item, f"prompt[{i}]", limits) for i, item in enumerate(prompt))


def _prompt(prompt: Any, param: str, limits: Limits) -> Prompt:
    match prompt:
        case str():
            return prompt
        case list():
            return _token_ids(prompt, param, limits)
    raise BadRequest(f"{param} must be a string or an array of token ids, got {shown(prompt)}.", param)


def _token_ids(ids: Any, param: str, limits: Limits) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise BadRequest(f"{param} must be a non-empty array of token ids, got {shown(ids)}.", param)
    if len(ids) > limits.max_model_len:
        raise context_exceeded(len(ids), limits.max_model_len, param)
    if not all(type(token_id) is int for token_id in ids):
        raise BadRequest(f"{param} must hold only integers.", param)
    _check_in_vocabulary(ids, param, limits)
    return tuple(ids)


def _check_in_vocabulary(ids: list[int] | tuple[int, ...], param: str, limits: Limits) -> None:
    for outlier in (min(ids), max(ids)):
        if not 0 <= outlier < limits.vocab_size:
            raise BadRequest(f"{param} must hold ids between 0 and {limits.vocab_size - 1}, got {outlier}.", param)


def _default(value: bool | None, default: bool) -> bool:
    return default if value is None else value
