"""The JSON bodies of the OpenAI API as they arrive, with the extras that vLLM's clients send through `extra_body`.

A field is declared with the type it must have, or with `only(...)` if just its neutral value is accepted; any other
field is refused by name. Counts are bounded, so that a body of any allowed size is cheap to refuse.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from backend.sampling_params import MAX_STOPS
from gateway.http.wire import MAX_FIELDS, Wire, only

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 64

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


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


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_flatten_content)] = None
    name: str | None = None
    # what the answers of this API hold, so that a client may send them back
    refusal: Annotated[None, only()] = None
    annotations: Annotated[None, only([])] = None
    audio: Annotated[None, only()] = None
    function_call: Annotated[None, only()] = None
    tool_calls: Annotated[None, only([])] = None


_Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
_PositiveInt = Annotated[int, Field(ge=1)]


class _StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Annotated[None, only(False)] = None
    continuous_usage_stats: bool | None = None  # vLLM's


class GenerationBody(Wire):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _PositiveInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None, BeforeValidator(_one_or_many)
    ] = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    # about the request, without effect on its answer
    service_tier: Tier | None = None
    user: str | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # not supported yet
    n: Annotated[None, only(1)] = None
    best_of: Annotated[None, only(1)] = None
    logit_bias: Annotated[None, only({})] = None
    store: Annotated[None, only(False)] = None
    response_format: Annotated[None, only({"type": "text"})] = None
    structured_outputs: Annotated[None, only()] = None
    prompt_logprobs: Annotated[None, only()] = None
    truncate_prompt_tokens: Annotated[None, only()] = None
    use_beam_search: Annotated[None, only(False)] = None
    length_penalty: Annotated[None, only(1, 1.0)] = None
    spaces_between_special_tokens: Annotated[None, only(True)] = None
    priority: Annotated[None, only(0)] = None
    cache_salt: Annotated[None, only()] = None


class ChatBody(GenerationBody):
    messages: _Messages
    max_completion_tokens: _PositiveInt | None = None
    add_generation_prompt: bool | None = None
    # not supported yet
    logprobs: Annotated[None, only(False)] = None
    top_logprobs: Annotated[None, only(0)] = None
    tools: Annotated[None, only([])] = None
    tool_choice: Annotated[None, only("none", "auto")] = None
    parallel_tool_calls: Annotated[None, only(True, False)] = None
    functions: Annotated[None, only([])] = None
    function_call: Annotated[None, only("none", "auto")] = None
    modalities: Annotated[None, only(["text"])] = None
    audio: Annotated[None, only()] = None
    prediction: Annotated[None, only()] = None
    moderation: Annotated[None, only()] = None
    prompt_cache_options: Annotated[None, only()] = None
    prompt_cache_retention: Annotated[None, only("in_memory")] = None
    reasoning_effort: Annotated[None, only("none")] = None
    verbosity: Annotated[None, only("medium")] = None
    web_search_options: Annotated[None, only()] = None
    chat_template: Annotated[None, only()] = None
    chat_template_kwargs: Annotated[None, only({})] = None
    continue_final_message: Annotated[None, only(False)] = None
    documents: Annotated[None, only([])] = None
    echo: Annotated[None, only(False)] = None


class CompletionBody(GenerationBody):
    prompt: Any
    # not supported yet
    logprobs: Annotated[None, only()] = None
    echo: Annotated[None, only(False)] = None
    suffix: Annotated[None, only("")] = None


class TokenizeBody(Wire):
    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    # not supported yet
    chat_template: Annotated[None, only()] = None
    chat_template_kwargs: Annotated[None, only({})] = None
    continue_final_message: Annotated[None, only(False)] = None
    tools: Annotated[None, only([])] = None


class DetokenizeBody(Wire):
    model: str | None = None
    tokens: Any
