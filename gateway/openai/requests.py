"""Reads the requests of the OpenAI API: the checked values that come of their JSON bodies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.sampling_params import SamplingParams
from gateway.errors import BadRequest
from gateway.http.json_body import JsonBody, shown
from gateway.openai.bodies import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    MAX_ANSWERS,
    MAX_PROMPTS,
    TOKENIZE,
    CompletionBody,
    GenerationBody,
    SamplingBody,
    Tier,
)
from gateway.openai.conversation import Conversation, read_conversation
from gateway.openai.foreign_fields import Ignored
from gateway.openai.limits import MAX_CUT_CONTEXTS, Limits, token_ids
from gateway.openai.sampling import sampling_of
from gateway.openai.structured import AskedGrammar, read_grammar

PromptInput = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """The requested details of tokens. Counts are numbers of most likely tokens at each position, besides the actual
    one; None: no log probabilities.
    """

    top: int | None = None  # of the answer
    top_of_prompt: int | None = None  # of the prompt, told apart from the answer
    ids: bool = False
    as_ids: bool = False  # tokens are spelled by id


NO_DETAILS = TokenDetails()


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """The part of a request that both dialects share: how to sample tokens, and how to answer."""

    model: str
    sampling: SamplingParams
    stream: bool
    include_usage: bool = False  # in a last chunk
    continuous_usage: bool = False  # in every chunk, its choice's so far
    include_stop: bool  # the stop string stays in the text
    skip_special_tokens: bool
    add_special_tokens: bool = False  # when the prompt is encoded
    service_tier: Tier | None
    user: str | None
    metadata: Mapping[str, Any] | None = None
    num_answers: int = 1  # to each prompt
    num_shown: int = 1  # the best of them
    details: TokenDetails = NO_DETAILS
    echo: bool = False  # the text begins with the prompt
    is_prompt_alone: bool = False  # the answer is the prompt alone
    answers_field: str = "n"  # the field of the number of answers
    bad_words: tuple[str, ...] = ()  # texts that the answer must not contain
    kept_tokens: int | None = None  # of the prompt, its last; -1: as many as leave room for the answer
    cache_salt: str | None = None  # blocks are shared only with requests of the same salt
    cached_for: float | None = None  # seconds for which the client wishes that its prompt stays cached
    top_field: str = "logprobs"  # the field of the number of most likely tokens
    length_field: str = "max_tokens"  # the field that bounds the answer
    grammar_field: str | None = None  # the field of the answer's constraint; None: any text
    ignored: Ignored | None = field(default=None, compare=False)  # fields without effect, including template variables
    left_out: list[str] = field(default_factory=list)  # places in its schemas that are not enforced

    @property
    def may_end(self) -> bool:
        """True if the gateway may end the answer before the model does, unknown to the engine."""
        return False

    @property
    def is_in_background(self) -> bool:
        """True if the answer is computed whether or not the client stays connected."""
        return False

    @property
    def keeps_spaces(self) -> bool:
        """True if a grammar of the client says how the text begins."""
        return (self.grammar_field or "").startswith("structured_outputs.")

    @property
    def offers_tools(self) -> bool:
        return False

    def grammar_sizes(self) -> list[tuple[int, str]]:
        """The sizes of its grammars in bytes, with the fields that hold them."""
        grammar = self.sampling.grammar
        return [] if grammar is None else [(len(grammar.source.encode()), self.grammar_field or "grammar")]

    @property
    def is_plain(self) -> bool:
        """True if the answers are text alone, without token details."""
        return self.details is NO_DETAILS and not self.echo and self.num_shown == self.num_answers


@dataclass(slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    conversation: Conversation
    shows_reasoning: bool = True  # the answer includes its reasoning
    thinking_budget: int | None = None  # tokens of its reasoning
    top_field: str = "top_logprobs"

    def grammar_sizes(self) -> list[tuple[int, str]]:
        tools, sizes = self.conversation.tools, GenerationRequest.grammar_sizes(self)
        return [*sizes, (tools.size, "tools")] if tools is not None and tools.is_constrained else sizes

    @property
    def may_end(self) -> bool:
        """True if the gateway may end the answer before the model does, unknown to the engine."""
        tools = self.conversation.tools
        return tools is not None and tools.is_single and tools.choice == "auto" and not tools.is_constrained

    @property
    def offers_tools(self) -> bool:
        tools = self.conversation.tools
        return tools is not None and tools.choice != "none"


@dataclass(slots=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    prompts: tuple[PromptInput, ...]  # at least one; a text may still encode to no token
    suffix: str = ""  # what comes after the answer


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A request to tokenize either `prompt` or `conversation`; one of them is set."""

    model: str | None
    prompt: str | None
    conversation: Conversation | None
    add_special_tokens: bool
    return_token_strs: bool
    ignored: Ignored | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str | None
    tokens: tuple[int, ...]
    ignored: Ignored | None = field(default=None, compare=False)


def parse_chat_request(raw: JsonBody, limits: Limits) -> ChatRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = CHAT.read(raw, ignored := limits.ignored())
    top, length = body.get("top_logprobs"), body.get("max_completion_tokens")
    if top and not body.get("logprobs"):
        raise BadRequest(
            "top_logprobs needs logprobs: set logprobs to true, or leave top_logprobs out.", "top_logprobs"
        )
    return ChatRequest(
        conversation=read_conversation(body, ignored),
        **_shared(
            body,
            limits,
            (body.get("max_tokens"), length),
            (top or 0) if body.get("logprobs") else None,
            body.get("prompt_logprobs"),
        ),
        ignored=ignored,
        add_special_tokens=bool(body.get("add_special_tokens")),
        shows_reasoning=body.get("include_reasoning") is not False,
        thinking_budget=body.get("thinking_token_budget"),
    )


def parse_completion_request(raw: JsonBody, limits: Limits) -> CompletionRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = COMPLETION.read(raw, ignored := limits.ignored())
    echo, best_of, n = bool(body.get("echo")), body.get("best_of"), body.get("n") or 1
    top, top_of_prompt = body.get("logprobs"), body.get("prompt_logprobs")
    _check_prompt_alone(body)
    if best_of is not None:
        _check_best_of(body, best_of, n)
    if echo and top is not None:
        top_of_prompt = max(top, top_of_prompt or 0)
    request = CompletionRequest(
        **_shared(
            body,
            limits,
            # computing the prompt yields one token, which is not sent
            (1 if body.get("max_tokens") == 0 else body.get("max_tokens"), None),
            0 if top is None and (best_of or 1) > n else top,
            top_of_prompt,
        ),
        ignored=ignored,
        add_special_tokens=body.get("add_special_tokens") is not False,
        prompts=_prompts(body["prompt"], limits, body.get("truncate_prompt_tokens") is not None),
        echo=echo,
        is_prompt_alone=body.get("max_tokens") == 0,
        suffix=body.get("suffix") or "",
    )
    if best_of is not None and best_of > n:
        request.num_answers, request.answers_field = best_of, "best_of"
    if echo and request.suffix:
        raise BadRequest("suffix cannot be combined with echo: leave either out.", "suffix")
    field = request.answers_field
    if request.num_answers * len(request.prompts) > MAX_ANSWERS:
        raise BadRequest(
            f"A request may have {MAX_ANSWERS} answers, got {field} = {request.num_answers} for each of "
            f"{len(request.prompts)} prompts; lower {field} or send fewer prompts.",
            field,
        )
    return request


def _check_prompt_alone(body: CompletionBody) -> None:
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise BadRequest(
            "max_tokens may be 0 only with echo: set echo to true, or max_tokens to 1 or more.", "max_tokens"
        )


def _check_best_of(body: CompletionBody, best_of: int, n: int) -> None:
    if best_of < n:
        raise BadRequest(
            f"best_of must be at least n, which is {n}, got {best_of}; raise it or leave it out.", "best_of"
        )
    if body.get("stream") and best_of > n:
        raise BadRequest(
            "best_of cannot be streamed, since the best is known at the end: set stream to false, or leave it out.",
            "best_of",
        )


def parse_tokenize_request(raw: JsonBody, limits: Limits | None = None) -> TokenizeRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    ignored = Ignored() if limits is None else limits.ignored()
    body = TOKENIZE.read(raw, ignored)
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("Send either prompt or messages.", "prompt")
    return TokenizeRequest(
        model=body.get("model"),
        prompt=prompt,
        conversation=None if messages is None else read_conversation(body, ignored),
        ignored=ignored,
        add_special_tokens=messages is None if (special := body.get("add_special_tokens")) is None else special,
        return_token_strs=bool(body.get("return_token_strs")),
    )


def parse_detokenize_request(raw: JsonBody, limits: Limits) -> DetokenizeRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = DETOKENIZE.read(raw, ignored := limits.ignored())
    tokens = token_ids(body["tokens"], "tokens", limits, least=0)
    return DetokenizeRequest(model=body.get("model"), tokens=tokens, ignored=ignored)


def shared_fields(
    body: SamplingBody,
    limits: Limits,
    asked: AskedGrammar | None,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """The request fields that all dialects share. `logprobs` and `prompt_logprobs` are the numbers that the model
    computes.
    """
    return {
        "model": body["model"],
        "sampling": sampling_of(
            body,
            limits,
            max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=asked and asked.grammar,
        ),
        "stream": bool(body.get("stream")),
        "include_stop": bool(body.get("include_stop_str_in_output")),
        "skip_special_tokens": body.get("skip_special_tokens") is not False,
        "service_tier": body.get("service_tier"),
        "user": body.get("user") or body.get("safety_identifier"),
        "metadata": body.get("metadata"),
        "bad_words": tuple(body.get("bad_words") or ()),
        "cache_salt": body.get("cache_salt"),
        "grammar_field": asked and asked.field,
        "left_out": list(asked.left_out) if asked else [],
    }


def _shared(
    body: GenerationBody,
    limits: Limits,
    lengths: tuple[int | None, int | None],
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> dict[str, Any]:
    """The fields of chats and completions. `lengths` are `max_tokens` and `max_completion_tokens`; `logprobs` and
    `prompt_logprobs` are the numbers that the model computes.
    """
    options, stream = body.get("stream_options"), bool(body.get("stream"))
    max_tokens, max_completion_tokens = lengths
    if options and not stream:
        raise BadRequest(
            "stream_options is only allowed when stream is true: set that, or leave it out.", "stream_options"
        )
    if stream and body.get("prompt_logprobs") is not None:
        raise BadRequest(
            "prompt_logprobs cannot be streamed: set stream to false, or leave prompt_logprobs out.", "prompt_logprobs"
        )
    # the larger of two token limits counts, as for a quota
    is_newer = (max_completion_tokens or 0) > (max_tokens or 0)
    include_usage = options is not None and bool(options.get("include_usage"))
    asked = read_grammar(body.get("response_format"), body.get("structured_outputs"))
    longest = max_completion_tokens if is_newer else max_tokens
    return {
        **shared_fields(body, limits, asked, longest, logprobs, prompt_logprobs),
        "details": _details(body),
        "include_usage": include_usage,
        "continuous_usage": options is not None and include_usage and bool(options.get("continuous_usage_stats")),
        "num_answers": body.get("n") or 1,
        "num_shown": body.get("n") or 1,
        "kept_tokens": _kept_tokens(body),
        "length_field": "max_completion_tokens" if is_newer else "max_tokens",
    }


def _details(body: Mapping[str, Any]) -> TokenDetails:
    """The token details that the body asks for, in either dialect."""
    top = body.get("logprobs")
    if isinstance(top, bool):
        top = (body.get("top_logprobs") or 0) if top else None
    asked = top, body.get("prompt_logprobs"), body.get("return_token_ids"), body.get("return_tokens_as_token_ids")
    if asked[:2] == (None, None) and not asked[2]:
        return NO_DETAILS
    return TokenDetails(asked[0], asked[1], bool(asked[2]), bool(asked[3]))


def _kept_tokens(body: GenerationBody) -> int | None:
    kept = body.get("truncate_prompt_tokens")
    if kept == 0:
        raise BadRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for the context's maximum, got 0; leave it out to keep "
            "all.",
            "truncate_prompt_tokens",
        )
    return kept


def _prompts(prompt: Any, limits: Limits, are_cut: bool) -> tuple[PromptInput, ...]:
    """The prompts; they may exceed the context if they `are_cut`."""
    most = MAX_CUT_CONTEXTS * limits.max_model_len if are_cut else limits.max_model_len
    if not isinstance(prompt, list) or (prompt and type(prompt[0]) is int):
        return (_prompt(prompt, "prompt", limits, most),)
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must hold between 1 and {MAX_PROMPTS} prompts, got {len(prompt)}.", "prompt")
    return tuple(_prompt(item, f"prompt[{i}]", limits, most) for i, item in enumerate(prompt))


def _prompt(prompt: Any, param: str, limits: Limits, most: int) -> PromptInput:
    match prompt:
        case str():
            return prompt
        case list():
            return token_ids(prompt, param, limits, most)
    raise BadRequest(f"{param} must be a string or an array of token ids, got {shown(prompt)}.", param)
