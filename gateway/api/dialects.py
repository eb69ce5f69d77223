"""The API's two ways to generate text: how each reads its bodies and its prompts, and how its answers are written."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.api.background_responses import BackgroundRun
from gateway.api.endpoint import Call
from gateway.api.frontend import Frontend
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import RequestScope
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.limits import Limits
from gateway.openai.logprobs import Spelling, ToldToken, completion_logprobs
from gateway.openai.replies import (
    Choice,
    CompletionChunks,
    Identity,
    StreamEncoder,
    TokenUsage,
    text_completion,
)
from gateway.openai.requests import (
    CompletionRequest,
    GenerationRequest,
    PromptInput,
    parse_completion_request,
)
from gateway.tenants.effective_policy import EffectivePolicy

PROMPT_TAIL_TOKENS = 8  # the last ids of a prompt, with which a completion may share a character


@dataclass(slots=True)
class Prompt:
    """One prompt as token ids, and the last of them, whose text the answer continues."""

    token_ids: list[int]
    tail: tuple[int, ...] | list[int]
    text: str | None = None  # the prompt, if the client asks for its echo: the answer begins with it
    begun: str = ""  # the part of the answer's message that the prompt already holds
    is_content: bool = False  # all text of the answer is content: neither reasoning nor calls


class Dialect:
    """Reads the bodies of one of the API's two ways to generate text, and says how its answers are written."""

    operation: str  # of the GenAI conventions
    prompt_param: str  # the field of the body that holds the prompt
    no_logprobs: Mapping[str, None] = MappingProxyType({})  # members of `logprobs` that are always null
    tells_content_alone = False  # log probabilities are those of the content: neither of reasoning nor of calls
    default_max_tokens: int | None = None  # of an answer, if neither client nor operator sets one

    def parse(self, body: JsonBody, limits: Limits) -> GenerationRequest:
        raise NotImplementedError

    async def prompts(self, request: Any, tenant: str, frontend: Frontend) -> list[Prompt]:
        raise NotImplementedError

    def identify(self, request: Any) -> Identity:
        raise NotImplementedError

    def in_background(
        self, call: Call, scope: RequestScope, policy: EffectivePolicy, request: Any, identity: Identity
    ) -> BackgroundRun:
        """The block in which an answer is generated that its client does not wait for."""
        raise NotImplementedError

    def bound(self, request: Any, most_reasoning: int | None, frontend: Frontend) -> None:
        """Bound the reasoning tokens of an answer to the maximum of the request's class."""

    def message(self, request: Any, prompt: Prompt, frontend: Frontend) -> AnswerMessage | None:
        """The message that the answer's text is parsed into; None: the text is sent as it is."""
        return None

    def chunks(
        self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage | None = None
    ) -> StreamEncoder:
        raise NotImplementedError

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        raise NotImplementedError

    async def whole(
        self, policy: EffectivePolicy, identity: Identity, choices: list[Choice], usage: TokenUsage
    ) -> bytes:
        """The body of a whole answer."""
        return self.complete(identity, choices, usage)

    async def end(self, policy: EffectivePolicy, chunks: StreamEncoder, usage: TokenUsage) -> bytes:
        """The last events of a stream."""
        return chunks.end(usage)

    def logprobs(self, tokens: Sequence[ToldToken], spelling: Spelling, top: int) -> dict[str, list[Any]]:
        """Log probabilities of the tokens, as arrays with one element for each token."""
        raise NotImplementedError

    async def encode(self, request: GenerationRequest, frontend: Frontend, tenant: str, text: str) -> list[int]:
        """The token ids of a text, truncated as the request asks; at least one. Raises `BadRequest` for a text without
        tokens.
        """
        is_cut = request.kept_tokens is not None
        token_ids = await frontend.encode(tenant, text, request.add_special_tokens, self.prompt_param, is_cut)
        if not token_ids:
            raise BadRequest(f"{self.prompt_param} is empty: there is no token to continue from.", self.prompt_param)
        return self.kept(request, frontend, token_ids) if is_cut else token_ids

    def kept(self, request: GenerationRequest, frontend: Frontend, token_ids: list[int]) -> list[int]:
        """The last token ids, truncated as the request asks, at least one."""
        most, model = request.kept_tokens, frontend.model
        if most is None:
            return token_ids
        if most < 0:
            answer = request.sampling.max_tokens or model.default_max_tokens or self.default_max_tokens or 1
            most = model.limits.max_model_len - answer
            if most < 1:
                field = request.length_field
                raise ContextLengthExceeded(
                    f"truncate_prompt_tokens = -1 keeps the end of the prompt that fits beside {field} in the context "
                    f"of {model.limits.max_model_len} tokens, and {answer} leave no room: lower {field}.",
                    field,
                )
        return token_ids[-most:]


class CompletionDialect(Dialect):
    """Prompts, each of which a text continues."""

    operation = "text_completion"
    prompt_param = "prompt"
    default_max_tokens = 16  # as OpenAI's and vLLM's

    def parse(self, body: JsonBody, limits: Limits) -> CompletionRequest:
        return parse_completion_request(body, limits)

    async def prompts(self, request: CompletionRequest, tenant: str, frontend: Frontend) -> list[Prompt]:
        prompts = []
        for given in request.prompts:
            if isinstance(given, str):
                token_ids = await self.encode(request, frontend, tenant, given)
            else:
                token_ids = self.kept(request, frontend, list(given))
            if request.suffix:
                token_ids = await self._around(request, frontend, tenant, token_ids)
            text = await self._echoed(request, frontend, tenant, given, token_ids) if request.echo else None
            prompts.append(Prompt(token_ids, () if request.suffix else token_ids[-PROMPT_TAIL_TOKENS:], text))
            await asyncio.sleep(0)  # many short prompts do not hold the loop
        return prompts

    async def _around(
        self, request: CompletionRequest, frontend: Frontend, tenant: str, token_ids: list[int]
    ) -> list[int]:
        """Prompt and suffix in the model's fill-in-the-middle format. Raises `BadRequest` if the model has none."""
        marks = frontend.tokenizer.fill_in_the_middle
        if marks is None:
            raise BadRequest(
                f"suffix is not possible with the model {frontend.model.name!r}, which cannot fill in the middle of a "
                "text: leave it out, or ask a model whose tokenizer has tokens for it.",
                "suffix",
            )
        before, behind, middle = marks
        suffix = await frontend.encode(tenant, request.suffix, False, "suffix")
        return [before, *token_ids, behind, *suffix, middle]

    async def _echoed(
        self, request: CompletionRequest, frontend: Frontend, tenant: str, given: PromptInput, token_ids: list[int]
    ) -> str:
        """The text of a prompt: the client's own if it sent text and nothing was truncated."""
        if isinstance(given, str) and request.kept_tokens is None:
            return given
        return await frontend.decode(tenant, token_ids, request.skip_special_tokens)

    def identify(self, request: CompletionRequest) -> Identity:
        return Identity.of_completion(request.model)

    def chunks(
        self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage | None = None
    ) -> StreamEncoder:
        return CompletionChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return text_completion(identity, choices, usage)

    def logprobs(self, tokens: Sequence[ToldToken], spelling: Spelling, top: int) -> dict[str, list[Any]]:
        return completion_logprobs(tokens, spelling, top)
