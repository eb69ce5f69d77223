"""Serves a request that generates text, from its body to the last event of its answer, inside one lexical scope."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from admission.outcome import Outcome
from backend.text.detokenizer import IncrementalDetokenizer
from gateway.api.choice_writer import ChoiceWriter, Progress
from gateway.api.client_deadlines import READ_TIMEOUT, read_deadlines, read_expected_followup
from gateway.api.detailed_text import DetailedChoiceWriter, DetailedText, Telling, told_choices
from gateway.api.dialects import Dialect, Prompt
from gateway.api.endpoint import Call, TokensEndpoint
from gateway.api.engine_client import Generation
from gateway.api.frontend import Frontend
from gateway.api.generation_request import GenerationParams
from gateway.api.guardrail import AnswerGuardrail
from gateway.api.text_stream import TextStream
from gateway.errors import BadRequest, DeadlineUnmeetable, Overloaded
from gateway.grammar_errors import GrammarsExceeded, GrammarsUnavailable, InvalidGrammar
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import RequestScope, has_come_whole
from gateway.http.responses import ResponseWriter
from gateway.key_mask import masked
from gateway.openai.json_schema import located, without_source
from gateway.openai.replies import Identity, StreamEncoder, TokenUsage
from gateway.openai.requests import GenerationRequest
from gateway.replica.fleet_secret import ATTEMPT_HEADER, PROGRESS_HEADER, UNKNOWN, Beginnings
from gateway.telemetry.request_record import num_cached_tokens
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.reservation import Attempt

Result = TypeVar("Result")


class GenerationEndpoint(TokensEndpoint):
    """Serves generations of one dialect.

    Leaving the scope, also by an error or a cancellation, ends the sequences, settles the quota and counts exactly one
    outcome.
    """

    def __init__(self, frontend: Frontend, dialect: Dialect) -> None:
        super().__init__(frontend)
        self._dialect, self.operation = dialect, dialect.operation

    async def serve(self, call: Call, policy: EffectivePolicy) -> Outcome:
        has_come = has_come_whole(call.response.exchange)
        attempt = self.frontend.keys.fleet.attempt(call.response.request_headers.get(ATTEMPT_HEADER))
        parse = partial(self._parse, policy=policy, scope=None if attempt is None else policy.cache_scope)
        tries, is_aliased, beginnings = await self.read(call, policy, parse)
        record, first = call.record, tries[0][1]
        record.body_read = self.frontend.telemetry.clock()
        record.sampling, record.streams = first.sampling, first.stream
        record.policy_version = self.frontend.effective_policies.version
        if not has_come:
            policy = self.present_policy(call)
        headers = call.response.extra_headers
        for number, (frontend, request) in enumerate(tries, 1):
            try:
                return await self._serve_by(frontend, call, policy, request, beginnings, attempt, is_aliased)
            except (Overloaded, DeadlineUnmeetable):
                if number == len(tries) or call.response.started is not None:
                    raise
                call.response.extra_headers = headers  # the others were about a model that does not answer
        raise AssertionError("a body names at least one model")

    async def _serve_by(
        self,
        frontend: Frontend,
        call: Call,
        policy: EffectivePolicy,
        request: GenerationRequest,
        beginnings: Beginnings,
        attempt: Attempt | None,
        is_aliased: bool,
    ) -> Outcome:
        """Serve a request by the model of this frontend."""
        dialect = self._dialect
        call.record.model = request.model and masked(request.model)
        headers, arrived, arrived_unix = call.scope["headers"], call.record.began, call.record.began_ns / 1e9
        is_in_background = request.is_in_background
        if is_in_background:  # its client's patience is about the answer to the call
            headers = [header for header in headers if header[0] != READ_TIMEOUT]
        deadlines, followup = read_deadlines(headers, request.stream, arrived_unix), read_expected_followup(headers)
        adapter = self.frontend.adapter_of(request.model, policy, is_aliased)
        policy.check_answers(request.num_answers, request.answers_field)
        for size, field in request.grammar_sizes():
            policy.check_grammar(size, field)
        if not request.is_plain:
            _check_details(request, policy)
        service_class = policy.service_class(request.service_tier)
        num_bytes = call.record.body_bytes
        dialect.bound(request, service_class.max_reasoning_tokens, frontend)
        params = GenerationParams(
            request,
            dialect,
            policy,
            service_class,
            deadlines,
            followup,
            arrived,
            num_bytes,
            beginnings,
            adapter=adapter,
            session=call.record.session,
        )
        if not is_in_background:  # else its router sees the beginning alone, and settles nothing
            params.attempt = attempt
        async with self.scoped(call) as scope:
            prompts = await dialect.prompts(request, policy.name, frontend)
            self.tell_ignored(call, request.ignored, request.left_out)
            policy.check_prompts(len(prompts) * request.num_answers)
            if request.bad_words:
                words = await frontend.bad_words(policy.name, request.bad_words)
                request.sampling = replace(request.sampling, bad_words=words)
            if policy.tenant.guardrail is not None:
                guardrail = frontend.guardrails.of(policy.tenant.guardrail, call.record)
                if guardrail.judges("prompt"):
                    ids = [prompt.token_ids for prompt in prompts]
                    await guardrail.check_prompts([await frontend.decode(policy.name, one, False) for one in ids])
                params.guardrail = guardrail if guardrail.judges("answer") else None
            each = [prompt for prompt in prompts for _ in range(request.num_answers)]
            identity = dialect.identify(request)
            if is_in_background:
                async with dialect.in_background(call, scope, policy, request, identity) as run:
                    params.on_admitted = run.begin
                    await self._generate(frontend, call, scope, params, identity, each)
            else:
                await self._generate(frontend, call, scope, params, identity, each)
        return scope.ended()

    def _parse(
        self, body: JsonBody, policy: EffectivePolicy, scope: str | None
    ) -> tuple[list[tuple[Frontend, GenerationRequest]], bool, Beginnings]:
        """Parse a body into the request for the frontend of each model to try, whether it named an alias of them, and
        the beginnings of its prompt, which no router needs without a scope. Raises `BadRequest` if it is no request for
        the first.
        """
        tries, asked = list[tuple[Frontend, GenerationRequest]](), self.frontend.model_in(body)
        for model in policy.models_of(asked):
            frontend = self.frontend.of(model)
            try:
                request = self._dialect.parse(body, frontend.model.limits)
            except BadRequest:
                if not tries:
                    raise
                continue  # what it asks is not within another model's limits
            request.model = model or request.model
            tries.append((frontend, request))
        is_aliased = asked is not None and asked in self.frontend.effective_policies.aliases
        return tries, is_aliased, UNKNOWN if scope is None else self.frontend.keys.fleet.beginnings(body.raw, scope)

    async def _generate(
        self,
        frontend: Frontend,
        call: Call,
        scope: RequestScope,
        params: GenerationParams,
        identity: Identity,
        prompts: list[Prompt],
    ) -> None:
        """Have the engine generate, within what it reserves for the request, and deliver the answer."""
        record, request = call.record, params.request
        record.response_id, record.service_class = identity.id, params.service_class.name
        record.num_answers = request.num_answers
        messages = [self._dialect.message(request, prompt, frontend) for prompt in prompts]
        detokenizers = [
            _detokenizer(frontend, request, prompt, message is not None)
            for prompt, message in zip(prompts, messages, strict=True)
        ]
        asked = params.engine_request(identity.id, prompts, frontend.model)
        parsed = [message for message in messages if message is not None and message.may_reason]
        asked.may_reason = bool(parsed)
        if params.clamped_to is not None:
            call.response.add_headers({"x-sluice-max-tokens": str(params.clamped_to)})
        try:
            generation = await frontend.engine.generate(asked, params.policy, record, scope.fail)
        except (InvalidGrammar, GrammarsExceeded, GrammarsUnavailable) as error:
            error.param, grammar = request.grammar_field, request.sampling.grammar
            if type(error) is InvalidGrammar and grammar is not None:
                complaint = error.message
                if grammar.is_schema:
                    locate = partial(located, complaint, grammar.source)
                    complaint = masked(
                        await frontend.body_reader.offload(params.policy.name, len(grammar.source), locate)
                    )
                elif error.param != "structured_outputs.grammar":
                    complaint = without_source(complaint)
                error.message = f"{error.param}: {complaint}"
            raise
        try:
            generation.parsed.extend(parsed)
            call.response.add_headers(generation.headers)
            if params.on_admitted is not None:
                await params.on_admitted()
            made, deliveries = zip(generation.streams, detokenizers, strict=True), frontend.deliveries
            if request.is_plain:
                each = zip(made, messages, strict=True)
                texts = [TextStream(*pair, generation, deliveries, message) for pair, message in each]
                await self._deliver(call.response, generation, identity, params, texts)
            else:
                telling = Telling.of(request, self._dialect, frontend.tokenizer)
                detailed = [
                    DetailedText(*pair, generation, deliveries, telling, prompt, message)
                    for pair, prompt, message in zip(made, prompts, messages, strict=True)
                ]
                await self._deliver(call.response, generation, identity, params, detailed)
        finally:
            generation.close()

    async def _deliver(
        self,
        response: ResponseWriter,
        generation: Generation,
        identity: Identity,
        params: GenerationParams,
        texts: Sequence[TextStream],
    ) -> None:
        """Deliver the answer. The quota is settled before its last byte, after which the client may send again."""
        dialect, request, policy, guardrail = self._dialect, params.request, params.policy, params.guardrail
        if request.stream:
            if guardrail is not None:
                for index, text in enumerate(texts):
                    text.guardrail = AnswerGuardrail(guardrail, index)
            chunks = [
                dialect.chunks(identity, request.include_usage, index, text.message) for index, text in enumerate(texts)
            ]
            response.failure = chunks[0].failure
            is_watched = params.attempt is not None and response.request_headers.get(PROGRESS_HEADER) is not None
            progress = Progress() if is_watched else None
            writers = [
                _writer(response, text, encoder, request.continuous_usage, progress)
                for text, encoder in zip(texts, chunks, strict=True)
            ]
            if len(writers) == 1:
                end = await writers[0].write_but_end()
            else:
                await _gather([writer.write_all() for writer in writers])
                end = b""
            await generation.settle()
            usage = _token_usage(texts, request.num_answers)
            await response.end_stream(end + await dialect.end(policy, chunks[0], usage))
        else:
            choices = await _gather([text.choice() for text in texts])
            if not request.is_plain:
                choices = await told_choices(texts, choices, request.num_answers, request.num_shown)
            await generation.settle()
            if guardrail is not None:
                await _gather([guardrail.check_answer(choice.text, index) for index, choice in enumerate(choices)])
            usage = _token_usage(texts, request.num_answers)
            await response.reply(await dialect.whole(policy, identity, choices, usage))


def _detokenizer(
    frontend: Frontend, request: GenerationRequest, prompt: Prompt, in_message: bool
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        frontend.tokenizer,
        request.sampling.stop,
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        prompt_tail=prompt.tail,
        min_tokens=request.sampling.min_tokens,
        in_message=in_message,
        keeps_spaces=request.keeps_spaces,
    )


def _check_details(request: GenerationRequest, policy: EffectivePolicy) -> None:
    """Raise `Unsatisfiable` if the tenant may not be told that many log probabilities at each position."""
    policy.check_logprobs(request.details.top, request.top_field)
    policy.check_logprobs(request.details.top_of_prompt, "prompt_logprobs")


def _writer(
    response: ResponseWriter, text: TextStream, chunks: StreamEncoder, continuous_usage: bool, progress: Progress | None
) -> ChoiceWriter:
    if isinstance(text, DetailedText):
        return DetailedChoiceWriter(response, text, chunks, continuous_usage, progress)
    return ChoiceWriter(response, text, chunks, continuous_usage, progress)


def _token_usage(texts: Sequence[TextStream], num_answers: int) -> TokenUsage:
    """Return the usage of a request in which each prompt has `num_answers` texts in a row and counts once."""
    sequences = [text.sequence for text in texts]
    return TokenUsage(
        prompt_tokens=sum([sequence.num_prompt_tokens for sequence in sequences[::num_answers]]),
        completion_tokens=sum([text.num_tokens for text in texts]),
        cached_tokens=num_cached_tokens(sequences, num_answers),
        reasoning_tokens=sum([text.message.num_reasoning_tokens for text in texts if text.message is not None]),
    )


async def _gather(coroutines: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run the coroutines concurrently; the first failure cancels the rest."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
