"""The bodies that clients of the OpenAI API send, as types: which fields there are, what each may be, and how many.

A body may have the extras that vLLM's clients send through `extra_body`. A field is declared with the type it must
have; `foreign_fields` says what becomes of others. Counts are bounded, so that a body of any allowed size is cheap to
refuse.
"""

from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # before Python 3.12, typing's does not tell each field's base

from backend.sampling_params import MAX_BAD_WORDS, MAX_BIASED, MAX_LOGPROBS, MAX_STOPS
from gateway.http.json_body import EXACT, MAX_FIELDS, BodyType, shown
from gateway.openai.foreign_fields import IGNORABLE, REFUSED_IN_CHAT, REFUSED_IN_COMPLETION, known_object
from gateway.openai.messages import Messages
from gateway.openai.structured import ResponseFormat, StructuredOutputsField
from gateway.openai.template_variables import Documents, Effort, Kwargs
from gateway.openai.tools import Tools
from quotas.policy.policy import MAX_N

MAX_PROMPTS = MAX_ANSWERS = MAX_N  # in one request
MAX_WORDS = MAX_BAD_WORDS // 2  # each may begin with a space, or not
MAX_WORD_CHARS = 256
MAX_SUFFIX_CHARS = 2**20
MAX_THINKING_TOKENS = 2**24
MAX_SALT_CHARS = 256

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


def _one_or_many(stop: Any) -> Any:
    """A list of texts; an empty text, as user interfaces send it, is no stop string."""
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list | None):
        wanted = f"must be a string, or an array of strings, got {shown(stop)}"
        raise PydanticCustomError("stop", wanted)
    return stop and [text for text in stop if text != ""]


def _unbounded(most: Any) -> Any:
    """None for -1, with which clients of llama.cpp and LM Studio leave an answer's length open."""
    return None if type(most) is int and most == -1 else most


PositiveInt = Annotated[int, Field(ge=1, le=2**63 - 1)]
Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]


@with_config(EXACT)
class StreamOptions(TypedDict, total=False):
    include_usage: bool | None
    continuous_usage_stats: bool | None  # vLLM's


@with_config(EXACT)
class SamplingBody(TypedDict, total=False):
    """The fields of all dialects: the model, and how its tokens are drawn.

    A field that was not sent is absent; null means the same.
    """

    model: Required[str]
    stream: bool | None
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None, BeforeValidator(_one_or_many)
    ]
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASED)] | None
    # vLLM's
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None
    allowed_token_ids: Any
    bad_words: Annotated[list[_Word], Field(max_length=MAX_WORDS, fail_fast=True)] | None
    # about the request, without effect on its answer
    service_tier: Tier | None
    user: str | None
    metadata: Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)] | None
    safety_identifier: str | None
    prompt_cache_key: str | None


@with_config(EXACT)
class GenerationBody(SamplingBody, total=False):
    """The fields that chats and completions share."""

    stream_options: (
        Annotated[
            StreamOptions,
            known_object(StreamOptions, "stream_options.", ignorable={"include_obfuscation": (False,)}),
        ]
        | None
    )
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None
    response_format: ResponseFormat | None
    # vLLM's
    add_special_tokens: bool | None
    structured_outputs: StructuredOutputsField | None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None
    prompt_logprobs: Top | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None


@with_config(EXACT)
class ChatBody(GenerationBody, total=False):
    messages: Required[Messages]
    max_tokens: Annotated[PositiveInt | None, BeforeValidator(_unbounded)]
    max_completion_tokens: Annotated[PositiveInt | None, BeforeValidator(_unbounded)]
    logprobs: bool | None
    top_logprobs: Top | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Tools | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    documents: Documents | None
    chat_template_kwargs: Kwargs | None
    reasoning_effort: Effort | None
    include_reasoning: bool | None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_THINKING_TOKENS)] | None


@with_config(EXACT)
class CompletionBody(GenerationBody, total=False):
    prompt: Required[Any]
    max_tokens: Annotated[int, Field(ge=0)] | None  # 0 with `echo`: the prompt alone
    logprobs: Top | None
    echo: bool | None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None


@with_config(EXACT)
class TokenizeBody(TypedDict, total=False):
    model: str | None
    prompt: str | None
    messages: Messages | None
    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    return_token_strs: bool | None
    continue_final_message: bool | None
    tools: Tools | None
    documents: Documents | None
    chat_template_kwargs: Kwargs | None
    reasoning_effort: Effort | None


@with_config(EXACT)
class DetokenizeBody(TypedDict, total=False):
    model: str | None
    tokens: Required[Any]


CHAT = BodyType[ChatBody](ChatBody, known_object(ChatBody, refused=REFUSED_IN_CHAT, ignorable=IGNORABLE))
COMPLETION = BodyType[CompletionBody](
    CompletionBody, known_object(CompletionBody, refused=REFUSED_IN_COMPLETION, ignorable=IGNORABLE)
)
_REFUSED_IN_TOKENIZE = {name: values for name, values in REFUSED_IN_CHAT.items() if name != "prompt"}
TOKENIZE = BodyType[TokenizeBody](
    TokenizeBody, known_object(TokenizeBody, refused=_REFUSED_IN_TOKENIZE, ignorable=IGNORABLE)
)
DETOKENIZE = BodyType[DetokenizeBody](DetokenizeBody, known_object(DetokenizeBody, ignorable=IGNORABLE))
