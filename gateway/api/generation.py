"""Serves a request that generates text, from its body to the last event of its answer, inside one lexical scope."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from admission.outcome import DeadlineInfeasible, Outcome, QueueFull
from admission.request import Asked
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from gateway import sse
from gateway.api.endpoint import Call, Endpoint
from gateway.api.generation_request import GenerationParams, Prompt, read_deadlines
from gateway.api.quota_extender import QuotaExtender
from gateway.api.rate_headers import rate_headers
from gateway.api.refusals import name_in_log, queue_full, refusal_of, unmeetable
from gateway.api.service import Service
from gateway.api.text_stream import TextStream
from gateway.errors import ApiError, BadRequest, ContextLengthExceeded, Unsatisfiable, context_exceeded
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import RequestScope
from gateway.http.responses import ResponseWriter
from gateway.openai.replies import Choice, Chunks, Identity, TokenUsage
from gateway.openai.requests import GenerationRequest
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.errors import QuotaError, QuotaRefused
from quotas.quotas import Grant
from quotas.reservation import Ask, Usage

Result = TypeVar("Result")

MINIMUM_ASK = Ask(1, 1, 1)  # every request asks for at least this


class GenerationEndpoint(Endpoint):
    """Serves a generation; a subclass says how its dialect reads a body and writes an answer.

    Whatever happens, leaving the scope ends the sequences and settles the quota, and exactly one outcome is counted.
    """

    async def answer(self, call: Call) -> Outcome:
        service = self.service
        call.record.operation = self.operation
        principal = self.authenticate(call)
        policy = service.policy(principal, "inference")
        try:
            await self._refuse_unread(call, policy)
            return await self._serve(call, principal, policy)
        except ApiError as error:
            if error.outcome is Outcome.INVALID and call.response.started is None:
                await self.refuse_spent(call, policy, MINIMUM_ASK)
            raise

    async def _refuse_unread(self, call: Call, policy: EffectivePolicy) -> None:
        """Refuse before the body is read, if the key was refused lately and its limit is still spent.

        The event log keeps such a request too. Raises `QuotaRefused`.
        """
        try:
            await self.refuse_spent(call, policy, MINIMUM_ASK, is_certain=False)
        except QuotaRefused as error:
            name, key = policy.name, policy.key
            self.service.admission.requested(Asked.unread(call.record.request_id, name, key, error.limit.name))
            raise

    async def _serve(self, call: Call, principal: Principal, policy: EffectivePolicy) -> Outcome:
        service = self.service
        arrived = service.admission.clock()
        request = await self.read(call, principal, self.parse)
        self._record_request(call.record, request)
        deadlines = read_deadlines(call.scope["headers"], request.stream, time.time())
        service.check_model(request.model)
        policy.check_model(request.model)
        service_class = policy.service_class(request.service_tier)
        params = GenerationParams(request, service_class, deadlines, arrived, call.record.body_bytes)
        scope = service.active_requests.scope(call.scope, call.receive, call.send, service.telemetry.clock)
        async with scope:
            call.response.send, call.record.scope = scope.send, scope
            prompts = await self.prompts(request, policy.name)
            policy.check_prompts(len(prompts))
            try:
                await self._generate_within_quota(call, scope, policy, params, prompts)
            except DeadlineInfeasible as error:
                raise unmeetable(error, deadlines.is_relative) from None
            except QueueFull as error:
                raise queue_full(error, params.service_class.name) from None
        if scope.error is not None:
            raise scope.error
        return scope.outcome or Outcome.COMPLETED

    def _record_request(self, record: RequestRecord, request: GenerationRequest) -> None:
        """Keep in the record what the client asks for."""
        record.body_read = self.service.telemetry.clock()
        record.model, record.request = request.model, request
        record.policy_version = self.service.policies.current.version

    async def _generate_within_quota(
        self,
        call: Call,
        scope: RequestScope,
        policy: EffectivePolicy,
        params: GenerationParams,
        prompts: list[Prompt],
    ) -> None:
        """Reserve what the request may use, and generate within the reservation."""
        request, record, clock = params.request, call.record, self.service.telemetry.clock
        identity = self.identify(request.model)
        record.response_id = identity.id
        record.service_class = params.service_class.name
        sequences = [
            self._sequence(f"{identity.id}-{index}", policy, params, prompt) for index, prompt in enumerate(prompts)
        ]
        num_prompt_tokens = sum(len(one.prompt) for one in sequences)
        ask = Ask(1, num_prompt_tokens, sum(one.token_limit for one in sequences) - num_prompt_tokens)
        admission = self.service.admission
        kv_leases, kv_blocks = self.service.kv_leases, self._kv_blocks(sequences)
        kv_leases.use(policy.name, policy.kv_bytes, kv_blocks)
        record.reserving = clock()
        with await self._reserve(call, identity.id, policy, params, sequences, ask) as grant:
            record.reserved, record.grant = clock(), grant
            if grant.states:
                call.response.add_headers(rate_headers(grant.states))
            with ExitStack() as admitted:
                kv_leases.serve(policy.name, kv_blocks)
                admitted.callback(kv_leases.served, policy.name, kv_blocks)
                texts = [
                    self._text_stream(admitted.enter_context(admission.admit(one)), request, prompt, record)
                    for one, prompt in zip(sequences, prompts, strict=True)
                ]
                grant.measure = partial(_usage, texts, self.service)
                if any(one.token_limit < one.most_tokens for one in sequences):
                    extender = QuotaExtender(grant, admission, lambda error: scope.fail(refusal_of(error)))
                    admitted.enter_context(extender).watch([text.tokens for text in texts])
                call.response.add_headers(_estimate_headers(texts))
                await self._generate(call, grant, identity, request, texts)

    async def _reserve(
        self,
        call: Call,
        request_id: str,
        policy: EffectivePolicy,
        params: GenerationParams,
        sequences: list[Sequence],
        ask: Ask,
    ) -> Grant:
        """Reserve `ask`, and record in the event log what was asked and what came of it. Raises as `Quotas.reserve`."""
        outage, record = policy.tenant.on_store_outage, self.service.admission.requested
        try:
            grant = await self.service.quotas.reserve(policy.name, policy.key, policy.charged, ask, outage)
        except QuotaError as error:
            if isinstance(error, QuotaRefused):
                call.response.add_headers(rate_headers(error.measure()))
            record(params.as_recorded(request_id, policy.name, policy.key, sequences, name_in_log(error)))
            raise
        record(params.as_recorded(request_id, policy.name, policy.key, sequences))
        return grant

    async def _generate(
        self,
        call: Call,
        grant: Grant,
        identity: Identity,
        request: GenerationRequest,
        texts: list[TextStream],
    ) -> None:
        """Deliver the answer. The quota is settled before its last byte, after which the client may send again."""
        response = call.response
        num_prompt_tokens = sum(len(text.sequence.prompt) for text in texts)
        if request.stream:
            chunks = [self.chunks(identity, request.include_usage, index) for index in range(len(texts))]
            await _gather(
                [
                    _stream_one(response, text, encoder, request.continuous_usage)
                    for text, encoder in zip(texts, chunks, strict=True)
                ]
            )
            self._settle(call.record, grant)
            usage = TokenUsage(num_prompt_tokens, sum(text.num_tokens for text in texts))
            await response.end_stream((chunks[0].usage(usage) if request.include_usage else b"") + sse.DONE)
        else:
            choices = await _gather([text.choice() for text in texts])
            self._settle(call.record, grant)
            usage = TokenUsage(num_prompt_tokens, sum(text.num_tokens for text in texts))
            await response.reply(self.complete(identity, choices, usage))

    def _settle(self, record: RequestRecord, grant: Grant) -> None:
        record.settling = self.service.telemetry.clock()
        grant.settle()

    def _kv_blocks(self, sequences: list[Sequence]) -> int:
        """Returns how many KV blocks the longest of these sequences may need."""
        longest = max(len(one.prompt) + one.max_tokens for one in sequences)
        return -(-longest // self.service.kv_shape.block_tokens)

    def _sequence(self, name: str, policy: EffectivePolicy, params: GenerationParams, prompt: Prompt) -> Sequence:
        """Returns the sequence by which the engine continues one prompt. Raises `Unsatisfiable`."""
        service, request, sampling = self.service, params.request, params.request.sampling
        num_prompt_tokens = len(prompt.token_ids)
        max_tokens = self._max_tokens(request, policy, num_prompt_tokens)
        ends = frozenset(sampling.stop_token_ids)
        sequence = Sequence(
            id=name,
            tenant=policy.name,
            prompt=prompt.token_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            end_tokens=ends if sampling.ignore_eos else ends | service.end_tokens,
            seed=service.draw_seed() if sampling.seed is None else sampling.seed,
            priority_class=params.service_class.level,
            token_interval=params.token_interval,
            first_token_target=params.service_class.ttft,
            first_token_by=params.first_token_by,
            done_by=params.done_by,
            body_bytes=params.num_bytes,
        )
        if sampling.max_tokens is None:
            expected = service.admission.expected_tokens(policy.name, max_tokens)
            if (reservable := policy.reservable(num_prompt_tokens, expected)) is not None:
                sequence.limit_to(reservable)
        return sequence

    def _text_stream(
        self, stream: TokenStream, request: GenerationRequest, prompt: Prompt, record: RequestRecord
    ) -> TextStream:
        service = self.service
        record.timelines.append(service.core_telemetry.timeline(stream.sequence))
        detokenizer = IncrementalDetokenizer(
            service.tokenizer,
            request.sampling.stop,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            prompt_tail=prompt.tail,
            min_tokens=request.sampling.min_tokens,
        )
        return TextStream(stream, detokenizer, service.admission, service.metrics)

    def _max_tokens(self, request: GenerationRequest, policy: EffectivePolicy, num_prompt_tokens: int) -> int:
        """Returns the client's limit, or the default within what the context and the tenant's KV memory leave.

        Raises `Unsatisfiable`.
        """
        context = self.service.limits.max_model_len
        available = context - num_prompt_tokens
        if available < 1:
            raise context_exceeded(num_prompt_tokens, context, self.prompt_param)
        asked, field = request.sampling.max_tokens, request.length_field
        if asked is not None and asked > available:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context} tokens, but {num_prompt_tokens} tokens of prompt "
                f"and {asked} of {field} were requested; lower {field} to {available} or shorten the prompt.",
                field,
            )
        shape = self.service.kv_shape
        policy.check_kv(num_prompt_tokens + (asked or 1), shape, field if asked else self.prompt_param)
        kv_tokens = policy.kv_tokens(shape) or context
        default = self.service.default_max_tokens or self.default_max_tokens or available
        max_tokens = asked or min(available, kv_tokens - num_prompt_tokens, default)
        _check_min_tokens(request.sampling.min_tokens, max_tokens)
        return max_tokens

    async def encode(self, tenant: str, text: str, add_special_tokens: bool) -> list[int]:
        token_ids = await self.service.encode(tenant, text, add_special_tokens, self.prompt_param)
        if not token_ids:
            raise BadRequest(f"{self.prompt_param} is empty: there is no token to continue from.", self.prompt_param)
        return token_ids

    # what the two endpoints differ in; a subclass defines each

    operation: str  # of the GenAI conventions
    prompt_param: str
    default_max_tokens: int | None = None  # of an answer for which neither the client nor the operator sets any

    def parse(self, body: JsonBody) -> Any:
        raise NotImplementedError

    async def prompts(self, request: Any, tenant: str) -> list[Prompt]:
        raise NotImplementedError

    def identify(self, model: str) -> Identity:
        raise NotImplementedError

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        raise NotImplementedError

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        raise NotImplementedError


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise Unsatisfiable(
            f"min_tokens is {min_tokens}, but this answer may have {max_tokens} tokens at most: "
            "lower min_tokens, shorten the prompt, or set max_tokens.",
            "min_tokens",
        )


def _estimate_headers(texts: list[TextStream]) -> dict[str, str]:
    """Returns headers with the milliseconds within which nine in ten first tokens, and last tokens, come."""
    sequences = [text.sequence for text in texts]
    first = [s.first_token_estimate for s in sequences if s.first_token_estimate is not None]
    last = [s.last_token_estimate for s in sequences if s.last_token_estimate is not None]
    estimates = {"x-sluice-estimate-ttft-ms": first, "x-sluice-estimate-ms": last}
    return {name: f"{1000 * max(seconds):.0f}" for name, seconds in estimates.items() if seconds}


def _usage(texts: list[TextStream], service: Service) -> Usage:
    """Returns what the request has used so far: nothing, not even one request, before anything was computed for it."""
    now = service.admission.clock()
    computed, generated, block_seconds = 0, 0, 0.0
    for text in texts:
        sequence = text.sequence
        computed += sequence.num_billed_tokens
        generated += text.num_computed
        block_seconds += sequence.block_seconds(now)
    byte_seconds = block_seconds * service.kv_shape.block_bytes
    return Usage(computed, generated, kv_byte_seconds=byte_seconds, requests=1 if computed else 0)


async def _stream_one(response: ResponseWriter, text: TextStream, chunks: Chunks, continuous_usage: bool) -> None:
    """Write one choice's events; the tokens that are pending when a write is due share it, and with
    `continuous_usage` one event, with the number of tokens that the choice has by then.
    """
    usage = TokenUsage(len(text.sequence.prompt), 0) if continuous_usage else None
    events = [chunks.start(usage)]
    while text.finish_reason is None:
        pieces = [piece for piece in await text.pieces() if piece]
        if usage is not None:
            usage = replace(usage, completion_tokens=text.num_tokens)
            pieces = ["".join(pieces)] if pieces else []
        events += [chunks.text(piece, usage) for piece in pieces]
        if text.finish_reason is not None:
            events.append(chunks.finish("length" if text.finish_reason is FinishReason.LENGTH else "stop", usage))
        if len(events) > 1 or events[0]:
            await response.stream(b"".join(events))
        events = [b""]


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
