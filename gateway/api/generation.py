"""Serves a request that generates text, from its body to the last event of its answer, inside one lexical scope."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar

from admission.outcome import Outcome
from backend.scheduler.sequence import FinishReason
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from gateway import sse
from gateway.api.endpoint import Call, Endpoint
from gateway.api.engine_client import Generation
from gateway.api.frontend import Frontend
from gateway.api.generation_request import (
    Dialect,
    GenerationParams,
    Prompt,
    read_deadlines,
    read_expected_followup,
)
from gateway.errors import ApiError, DeadlineExceeded, ModelFailed, Preempted
from gateway.http.request_scope import Exchange, RequestScope, has_come_whole
from gateway.http.responses import ResponseWriter
from gateway.openai.replies import Choice, Chunks, Identity, TokenUsage
from gateway.openai.requests import GenerationRequest
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.request_record import RequestRecord, num_cached_tokens
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy

Result = TypeVar("Result")


class GenerationEndpoint(Endpoint):
    """Serves generations of one dialect.

    Whatever happens, leaving the scope ends the sequences and settles the quota, and exactly one outcome is counted.
    """

    def __init__(self, frontend: Frontend, dialect: Dialect) -> None:
        super().__init__(frontend)
        self._dialect = dialect

    async def answer(self, call: Call) -> Outcome:
        call.record.operation = self._dialect.operation
        principal = self.authenticate(call)
        policy = self.frontend.policy(principal, "inference")
        try:
            if policy.charged:
                await self.frontend.engine.refuse_unread(policy, call.record.request_id)
            return await self._serve(call, principal, policy)
        except ApiError as error:
            if error.outcome is Outcome.INVALID and call.response.started is None and policy.charged:
                await self.frontend.engine.refuse_spent(policy)
            raise

    async def _serve(self, call: Call, principal: Principal, policy: EffectivePolicy) -> Outcome:
        frontend, dialect = self.frontend, self._dialect
        arrived, has_come = frontend.telemetry.clock(), has_come_whole(call.scope)
        request = await self.read(call, policy, lambda body: dialect.parse(body, frontend.model.limits))
        self._record_request(call.record, request)
        policy = self._present_policy(call, principal, has_come)
        headers = call.scope["headers"]
        deadlines, followup = read_deadlines(headers, request.stream, time.time()), read_expected_followup(headers)
        frontend.check_model(request.model)
        policy.check_model(request.model)
        service_class = policy.service_class(request.service_tier)
        num_bytes = call.record.body_bytes
        params = GenerationParams(request, dialect, policy, service_class, deadlines, followup, arrived, num_bytes)
        scope = frontend.active_requests.scope(call.scope, call.receive, call.send, frontend.telemetry.clock)
        async with scope:
            call.response.send, call.record.scope = scope.send, scope
            prompts = await dialect.prompts(request, policy.name, frontend)
            policy.check_prompts(len(prompts) * request.num_answers)
            each = [prompt for prompt in prompts for _ in range(request.num_answers)]
            await self._generate(call, scope, params, each)
        if scope.error is not None:
            raise scope.error
        return scope.outcome or Outcome.COMPLETED

    def _present_policy(self, call: Call, principal: Principal, had_come: bool) -> EffectivePolicy:
        """Returns what the key may do now that the body is here: one that had not come at first may have taken minutes.

        Raises `InvalidApiKey` if the key was revoked meanwhile, and `Forbidden` if it may not generate any more.
        """
        if not had_come:
            principal = self.frontend.keys.authenticate(call.response.request_header(b"authorization"))
        return self.frontend.policy(principal, "inference")

    def _record_request(self, record: RequestRecord, request: GenerationRequest) -> None:
        """Keep in the record what the client asks for."""
        record.body_read = self.frontend.telemetry.clock()
        record.model, record.sampling, record.streams = request.model, request.sampling, request.stream
        record.policy_version = self.frontend.effective_policies.version

    async def _generate(self, call: Call, scope: RequestScope, params: GenerationParams, prompts: list[Prompt]) -> None:
        """Have the engine generate, within what it reserves for the request, and deliver the answer."""
        frontend, record, request = self.frontend, call.record, params.request
        identity = self._dialect.identify(request.model)
        record.response_id, record.service_class = identity.id, params.service_class.name
        record.num_choices, record.num_answers = len(prompts), request.num_answers
        detokenizers = [self._detokenizer(request, prompt) for prompt in prompts]
        asked = params.engine_request(identity.id, prompts, frontend.model)
        generation = await frontend.engine.generate(asked, params.policy, record, scope.fail)
        try:
            call.response.add_headers(generation.headers)
            texts = [
                TextStream(stream, detokenizer, generation, frontend.deliveries)
                for stream, detokenizer in zip(generation.streams, detokenizers, strict=True)
            ]
            await self._deliver(call.response, generation, identity, request, texts)
        finally:
            generation.close()

    async def _deliver(
        self,
        response: ResponseWriter,
        generation: Generation,
        identity: Identity,
        request: GenerationRequest,
        texts: list["TextStream"],
    ) -> None:
        """Deliver the answer. The quota is settled before its last byte, after which the client may send again."""
        dialect = self._dialect
        if request.stream:
            chunks = [dialect.chunks(identity, request.include_usage, index) for index in range(len(texts))]
            writers = [
                ChoiceWriter(response, text, encoder, request.continuous_usage)
                for text, encoder in zip(texts, chunks, strict=True)
            ]
            if len(writers) == 1:
                end = await writers[0].write_but_end()
            else:
                await _gather([writer.write_all() for writer in writers])
                end = b""
            await generation.settle()
            usage = chunks[0].usage(_token_usage(texts, request.num_answers)) if request.include_usage else b""
            await response.end_stream(end + usage + sse.DONE)
        else:
            choices = await _gather([text.choice() for text in texts])
            await generation.settle()
            await response.reply(dialect.complete(identity, choices, _token_usage(texts, request.num_answers)))

    def _detokenizer(self, request: GenerationRequest, prompt: Prompt) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self.frontend.tokenizer,
            request.sampling.stop,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            prompt_tail=prompt.tail,
            min_tokens=request.sampling.min_tokens,
        )


class TextStream:
    """Yields the text of one sequence as its tokens come: one piece for each token that completes any text."""

    def __init__(
        self,
        tokens: TokenStream,
        detokenizer: IncrementalDetokenizer,
        generation: Generation,
        deliveries: DeliveryMetrics,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0  # delivered: those sampled after a stop string are not
        self._delivered_at = 0.0
        self._kept: list[int] = []  # delivered, and not made into text yet
        self.tokens = tokens
        self.sequence = tokens.sequence
        self.may_stop = detokenizer.may_stop
        self._detokenizer = detokenizer
        self._generation = generation
        self._deliveries = deliveries

    async def pieces(self, receiver: Callable[[], bool] | None = None) -> list[str]:
        """Wait for tokens and return their text, in pieces that are not empty. The stream is complete once
        `finish_reason` is set. A `receiver` is called as by `TokenStream.take`.

        Raises `Preempted` when the sequence lost its memory for good, `DeadlineExceeded` when its time is over,
        `ModelFailed` when the model computed no numbers for it, and `DeviceError` when the engine failed.
        """
        pieces = self.push(await self._take(receiver))
        if self.finish_reason is None and self.tokens.finish_reason is not None and (rest := self._finish()):
            pieces.append(rest)
        return pieces

    def push(self, tokens: list[int]) -> list[str]:
        """Return the text of these tokens, in pieces that are not empty. A stop string sets `finish_reason`."""
        self._note_delivery(len(tokens))
        if not self.may_stop:
            self.num_tokens += len(tokens)
            return self._detokenizer.push_each(tokens)
        pieces: list[str] = []
        for token_id in tokens:
            self.num_tokens += 1
            pieces += self._detokenizer.push_each((token_id,))
            if self._detokenizer.stopped is not None:
                self.finish_reason = FinishReason.STOP
                self._generation.stop(self.tokens, self.num_tokens)
                break
        return pieces

    async def choice(self) -> Choice:
        """Wait for the whole text. Tokens are looked at as they come only where a stop string could end it early."""
        pieces: list[str] = []
        self.tokens.eager = self.may_stop
        while self.finish_reason is None:
            pieces += await (self.pieces() if self.tokens.eager else self._all())
        return Choice("".join(pieces), _finish_reason(self))

    async def _all(self) -> list[str]:
        """Wait for the last token and return the text of all. Those before it are taken by a plain call."""
        while True:
            self._keep(await self._take(self._keep_pending))
            if self.tokens.finish_reason is not None:
                return [self._detokenizer.push(self._kept), self._finish()]

    def _keep_pending(self) -> bool:
        self._keep(self.tokens.rest())
        return True

    def _keep(self, tokens: list[int]) -> None:
        """Count tokens whose text has time until the last is here."""
        self._note_delivery(len(tokens))
        self.num_tokens += len(tokens)
        self._kept += tokens

    async def _take(self, receiver: Callable[[], bool] | None = None) -> list[int]:
        tokens = await self.tokens.take(receiver)
        if self.tokens.finish_reason is not None:
            _check_complete(self.tokens.finish_reason)
        return tokens

    def _note_delivery(self, count: int) -> None:
        self._delivered_at = self._deliveries.delivered(self.sequence, self.num_tokens, count, self._delivered_at)

    def _finish(self) -> str:
        """End the stream and return the text that was held back, in which a stop string may be complete only now."""
        rest = self._detokenizer.finish()
        stopped = self._detokenizer.stopped is not None
        self.finish_reason = FinishReason.STOP if stopped else self.tokens.finish_reason
        return rest


def _check_complete(reason: FinishReason) -> None:
    """Raises the error for which a sequence was cut short."""
    match reason:
        case FinishReason.PREEMPTED:
            raise Preempted
        case FinishReason.FAILED:
            raise ModelFailed
        case FinishReason.EXPIRED:
            raise DeadlineExceeded("The deadline of the request passed before it could be met.")


def _token_usage(texts: list[TextStream], num_answers: int) -> TokenUsage:
    """Returns the usage of a request in which so many texts in a row answer one prompt, which counts once."""
    sequences = [text.sequence for text in texts]
    return TokenUsage(
        prompt_tokens=sum(len(sequence.prompt) for sequence in sequences[::num_answers]),
        completion_tokens=sum(text.num_tokens for text in texts),
        cached_tokens=num_cached_tokens(sequences, num_answers),
    )


class ChoiceWriter:
    """Writes one choice's events. The tokens that are pending when a write is due share it, and with `continuous_usage`
    one event, with the number of tokens that the choice has by then.

    Once the stream has begun, text is written right where tokens are delivered, by a plain call. Whatever may have to
    wait, or may end the stream, is written by the coroutine: the first token and the last, text in which a stop string
    may be complete, and all that comes while the client reads too slowly.
    """

    __slots__ = ("_chunks", "_response", "_text", "_usage")

    def __init__(self, response: ResponseWriter, text: TextStream, chunks: Chunks, continuous_usage: bool) -> None:
        self._response = response
        self._text = text
        self._chunks = chunks
        self._usage = TokenUsage(len(text.sequence.prompt), 0) if continuous_usage else None

    async def write_all(self) -> None:
        await self._response.stream(await self.write_but_end())

    async def write_but_end(self) -> bytes:
        """Write all events but the last ones, which are returned: they share a write with the end of the stream."""
        text, receiver = self._text, None
        start = self._chunks.start(self._usage)
        events = [start] if start else []
        while text.finish_reason is None:
            events += self._events(await text.pieces(receiver))
            if events and text.finish_reason is None:
                await self._response.stream(b"".join(events))
                events = []
                if self._response.exchange is not None and not text.may_stop:
                    receiver = partial(self._write_pending, self._response.exchange)
        return b"".join([*events, self._chunks.finish(_finish_reason(text), self._usage)])

    def _write_pending(self, exchange: Exchange) -> bool:
        """Write what is pending, unless that may have to wait: then take nothing and return False."""
        if not exchange.is_writable:
            return False
        if events := self._events(self._text.push(self._text.tokens.rest())):
            exchange.write(b"".join(events))
        return True

    def _events(self, pieces: list[str]) -> list[bytes]:
        chunks, usage = self._chunks, self._usage
        if usage is not None:
            usage.completion_tokens = self._text.num_tokens
            usage.cached_tokens = self._text.sequence.num_cached_tokens
            return [chunks.text("".join(pieces), usage)] if pieces else []
        return list(map(chunks.text, pieces))


def _finish_reason(text: TextStream) -> Literal["length", "stop"]:
    return "length" if text.finish_reason is FinishReason.LENGTH else "stop"


async def _gather(coroutines: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run them side by side; the first failure cancels the rest."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
