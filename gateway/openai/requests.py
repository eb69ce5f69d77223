"""Parses the requests of the OpenAI API into checked values of the types that the server works with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from backend.errors import InvalidRequest
from backend.sampling_params import SamplingParams
from gateway.errors import BadRequest, context_exceeded, translate
from gateway.http.json_body import JsonBody
from gateway.http.wire import read, shown
from gateway.openai.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Tier,
    TokenizeBody,
)

MAX_PROMPTS = 128

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that a request is checked against before it is tokenized, and the model's defaults for sampling."""

    vocab_size: int
    max_model_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams, the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
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
    length_field: str = "max_tokens"  # the one that bounds the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    messages: tuple[Mapping[str, str], ...]  # role, content and perhaps name, as chat templates read them
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
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
    body = read(ChatBody, raw)
    _check_contents(body.messages)
    return ChatRequest(
        **_shared(body, limits, add_special_tokens=False),
        messages=tuple(_template_message(message) for message in body.messages),
        add_generation_prompt=_default(body.add_generation_prompt, True),
    )


def parse_completion_request(raw: JsonBody, limits: Limits) -> CompletionRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = read(CompletionBody, raw)
    return CompletionRequest(
        **_shared(body, limits, add_special_tokens=True),
        prompts=_prompts(body.prompt, limits),
    )


def parse_tokenize_request(raw: JsonBody) -> TokenizeRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = read(TokenizeBody, raw)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either prompt or messages.", "prompt")
    _check_contents(body.messages or ())
    return TokenizeRequest(
        model=body.model,
        prompt=body.prompt,
        messages=None if body.messages is None else tuple(_template_message(message) for message in body.messages),
        add_generation_prompt=_default(body.add_generation_prompt, True),
        add_special_tokens=_default(body.add_special_tokens, body.messages is None),
        return_token_strs=_default(body.return_token_strs, False),
    )


def parse_detokenize_request(raw: JsonBody, limits: Limits) -> DetokenizeRequest:
    """Parse a body. Raises `ApiError`, and nothing else, whatever it is."""
    body = read(DetokenizeBody, raw)
    return DetokenizeRequest(model=body.model, tokens=_token_ids(body.tokens, "tokens", limits))


def _shared(body: GenerationBody, limits: Limits, add_special_tokens: bool) -> dict[str, Any]:
    if body.stream_options and not body.stream:
        raise BadRequest("stream_options is only allowed when stream is true.", "stream_options")
    length_field, options = _length_field(body), body.stream_options
    return {
        "model": body.model,
        "sampling": _sampling(body, limits, length_field),
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.include_usage and options.continuous_usage_stats),
        "include_stop": _default(body.include_stop_str_in_output, False),
        "skip_special_tokens": _default(body.skip_special_tokens, True),
        "add_special_tokens": _default(body.add_special_tokens, add_special_tokens),
        "service_tier": body.service_tier,
        "user": body.user,
        "length_field": length_field,
    }


_SAMPLING_FIELDS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos",
)  # fmt: skip


def _sampling(body: GenerationBody, limits: Limits, length_field: str) -> SamplingParams:
    """Returns the sampling parameters; null stands for the default, which the model may set."""
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    stop_token_ids = tuple(body.stop_token_ids or ())
    if stop_token_ids:
        _check_in_vocabulary(stop_token_ids, "stop_token_ids", limits)
    try:
        return _checked(
            **{**limits.sampling_defaults, **given},
            max_tokens=getattr(body, length_field),
            stop=tuple(body.stop or ()),
            stop_token_ids=stop_token_ids,
        )
    except InvalidRequest as exc:
        raise translate(exc) from exc


def _length_field(body: GenerationBody) -> str:
    """Returns the field that limits the answer: the larger of two token limits counts, as for a quota."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return "max_completion_tokens" if (newer or 0) > (body.max_tokens or 0) else "max_tokens"


@lru_cache(maxsize=64, typed=True)
def _checked(**fields: Any) -> SamplingParams:
    """Returns checked parameters from a cache: clients seldom change how they sample."""
    return SamplingParams(**fields)


def _check_contents(messages: Iterable[ChatMessage]) -> None:
    """Raises `BadRequest` for a message without content, which only an assistant's may lack, since an answer can."""
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            param = f"messages[{index}].content"
            raise BadRequest(f"{param} is required: a string, or an array of text parts.", param)


def _template_message(message: ChatMessage) -> dict[str, str]:
    """Returns the message as chat templates read it; `developer`, as newer clients say, becomes `system`."""
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content or "", **named}


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
