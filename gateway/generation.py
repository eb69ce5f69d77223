"""The life of a request that generates text, from its bytes to the last event, as one lexical scope."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from admission.outcome import Outcome
from admission.request import Request
from backend.detokenizer import IncrementalDetokenizer
from backend.sequence import FinishReason
from gateway import sse
from gateway.answer import Answer
from gateway.endpoint import Call, Endpoint
from gateway.errors import BadRequest, Unsatisfiable, context_exceeded
from gateway.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat_request,
    parse_completion_request,
)
from gateway.replies import (
    ChatChunks,
    Choice,
    Chunks,
    CompletionChunks,
    Identity,
    Usage,
    chat_completion,
    text_completion,
)
from gateway.responses import Exchange
from gateway.scope import RequestScope

Result = TypeVar("Result")

PROMPT_TAIL = 8  # ids of a prompt that the text of a completion may continue


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine takes it, and the ids whose text its answer continues."""

    token_ids: list[int]
    tail: Sequence[int]


class GenerationEndpoint(Endpoint):
    """Subclasses say how a body is read and how an answer is written; the life is here.

    Whatever happens, leaving the scope ends the sequences, and exactly one outcome is counted.
    """

    async def answer(self, call: Call) -> Outcome:
        service = self.service
        principal = service.keys.authenticate(call.exchange.header(b"authorization"))
        request = self.parse(await service.read_body(call.scope, call.receive))
        service.check_model(request.model)
        async with RequestScope(call.scope, call.receive, call.send) as life:
            call.exchange.send = life.send
            with service.lives.watching(life):
                prompts = await self.prompts(request)
                await self._generate(call.exchange, principal.tenant, request, prompts)
        if life.error is not None:
            raise life.error
        return life.outcome or Outcome.COMPLETED

    def ended(self, outcome: Outcome) -> None:
        self.service.metrics.request_ended(outcome)

    async def _generate(
        self, exchange: Exchange, tenant: str, request: GenerationRequest, prompts: list[Prompt]
    ) -> None:
        identity = self.identify(request.model)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        with ExitStack() as admitted:
            answers = [
                admitted.enter_context(self._admit(f"{identity.id}-{index}", tenant, request, prompt))
                for index, prompt in enumerate(prompts)
            ]
            if request.stream:
                await self._stream(exchange, identity, request, answers, num_prompt_tokens)
            else:
                choices = await _together([answer.choice() for answer in answers])
                usage = Usage(num_prompt_tokens, sum(answer.num_tokens for answer in answers))
                await exchange.reply(self.complete(identity, choices, usage))

    async def _stream(
        self,
        exchange: Exchange,
        identity: Identity,
        request: GenerationRequest,
        answers: list[Answer],
        num_prompt_tokens: int,
    ) -> None:
        writers = [self.chunks(identity, request.include_usage, index) for index in range(len(answers))]
        await _together(
            [_stream_one(exchange, answer, writer) for answer, writer in zip(answers, writers, strict=True)]
        )
        end = sse.DONE
        if request.include_usage:
            usage = Usage(num_prompt_tokens, sum(answer.num_tokens for answer in answers))
            end = writers[0].usage(usage) + end
        await exchange.end_stream(end)

    @contextmanager
    def _admit(self, request_id: str, tenant: str, request: GenerationRequest, prompt: Prompt) -> Iterator[Answer]:
        service, sampling = self.service, request.sampling
        ends = frozenset(sampling.stop_token_ids)
        admission_request = Request(
            id=request_id,
            tenant=tenant,
            prompt=prompt.token_ids,
            sampling=sampling,
            max_tokens=self._max_tokens(request, len(prompt.token_ids)),
            end_tokens=ends if sampling.ignore_eos else ends | service.end_tokens,
            seed=service.draw_seed() if sampling.seed is None else sampling.seed,
        )
        detokenizer = IncrementalDetokenizer(
            service.tokenizer,
            sampling.stop,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            prompt_tail=prompt.tail,
            min_tokens=sampling.min_tokens,
        )
        with service.admission.admit(admission_request) as stream:
            yield Answer(stream, detokenizer, service.admission, service.metrics)

    def _max_tokens(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        """What was asked for, or the default within what the context leaves. Raises `Unsatisfiable`."""
        context = self.service.limits.max_model_len
        room = context - num_prompt_tokens
        if room < 1:
            raise context_exceeded(num_prompt_tokens, context, self.prompt_param)
        asked = request.sampling.max_tokens
        if asked is None:
            return min(room, self.service.default_max_tokens or room)
        if asked > room:
            raise Unsatisfiable(
                f"This model's maximum context length is {context} tokens, but {num_prompt_tokens} tokens of prompt "
                f"and {asked} of max_tokens were requested; lower max_tokens to {room} or shorten the prompt.",
                "max_tokens",
            )
        return asked

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids = await self.service.encode(text, add_special_tokens, self.prompt_param)
        if not token_ids:
            raise BadRequest(f"{self.prompt_param} is empty: there is no token to continue from.", self.prompt_param)
        return token_ids

    # what the two endpoints differ in

    prompt_param: str

    def parse(self, body: bytes) -> Any:
        raise NotImplementedError

    async def prompts(self, request: Any) -> list[Prompt]:
        raise NotImplementedError

    def identify(self, model: str) -> Identity:
        raise NotImplementedError

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        raise NotImplementedError

    def complete(self, identity: Identity, choices: list[Choice], usage: Usage) -> bytes:
        raise NotImplementedError


class ChatEndpoint(GenerationEndpoint):
    """POST /v1/chat/completions."""

    prompt_param = "messages"

    def parse(self, body: bytes) -> ChatRequest:
        return parse_chat_request(body, self.service.limits)

    async def prompts(self, request: ChatRequest) -> list[Prompt]:
        tokenizer = self.service.tokenizer
        text = tokenizer.render_chat(request.messages, request.add_generation_prompt)
        return [Prompt(await self._encode(text, request.add_special_tokens), ())]

    def identify(self, model: str) -> Identity:
        return Identity.of_chat(model)

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        return ChatChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: Usage) -> bytes:
        return chat_completion(identity, choices, usage)


class CompletionEndpoint(GenerationEndpoint):
    """POST /v1/completions."""

    prompt_param = "prompt"

    def parse(self, body: bytes) -> CompletionRequest:
        return parse_completion_request(body, self.service.limits)

    async def prompts(self, request: CompletionRequest) -> list[Prompt]:
        prompts = []
        for given in request.prompts:
            token_ids = await self._encode(given, request.add_special_tokens) if isinstance(given, str) else list(given)
            prompts.append(Prompt(token_ids, token_ids[-PROMPT_TAIL:]))
            await asyncio.sleep(0)  # many short prompts do not hold the loop
        return prompts

    def identify(self, model: str) -> Identity:
        return Identity.of_completion(model)

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        return CompletionChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: Usage) -> bytes:
        return text_completion(identity, choices, usage)


async def _stream_one(exchange: Exchange, answer: Answer, chunks: Chunks) -> None:
    """Write one choice's events; the tokens that are pending when a write is due share it."""
    events = [chunks.start()]
    while answer.finish_reason is None:
        events += [chunks.text(piece) for piece in await answer.pieces() if piece]
        if answer.finish_reason is not None:
            events.append(chunks.finish("length" if answer.finish_reason is FinishReason.LENGTH else "stop"))
        if len(events) > 1 or events[0]:
            await exchange.stream(b"".join(events))
        events = [b""]


async def _together(coroutines: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run them side by side; the first failure cancels the rest."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
