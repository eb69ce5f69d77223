"""Serves requests to generate on the engine of this process: it charges their limits, queues them and settles them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from admission.encoding import EncodingRequest
from admission.outcome import AdmissionRefused, DeadlineInfeasible, QueueFull
from admission.promise import Promise
from admission.request import JudgedRequest
from backend.grammar import Grammar
from backend.scheduler.sequence import SPARE_CLASS, FinishReason, Sequence
from backend.stream import TokenStream
from gateway.api.engine_client import READY, EncodingAsk, Health, KVMemory, ParsedAnswer
from gateway.api.engine_request import EngineRequest, ask_of
from gateway.api.grammars import hold_grammar
from gateway.api.quota_extender import QuotaExtender
from gateway.api.refusals import name_in_log, queue_full, refusal_of, unmeetable
from gateway.api.service import EngineModel, Service
from gateway.errors import ApiError, DeadlineExceeded
from gateway.replica.state import LoadTotals
from gateway.telemetry.request_record import RequestRecord, current
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.errors import QuotaError, QuotaRefused, StoreUnavailable
from quotas.policy.limit import Limit
from quotas.quotas import Grant
from quotas.reservation import Ask, LimitState, Usage
from quotas.stored import Held, Stored

log = logging.getLogger(__name__)

T = TypeVar("T")

MINIMUM_ASK = Ask(1, 1, 1)  # every request asks for at least this

Headers = Mapping[str, str]
MakeStream = Callable[[Sequence], TokenStream]
_NONE: Headers = {}
_NO_TIMEOUT = nullcontext()  # a timeout of None takes 2 us


class InProcessGeneration:
    """An admitted request on the engine of this process; see `Generation`."""

    def __init__(
        self,
        client: "InProcessClient",
        record: RequestRecord,
        grant: Grant,
        headers: Headers,
        held: ExitStack,
        is_line: bool,
    ) -> None:
        """`held` is closed once the answers have ended: it keeps their grammar. The use of a line of a batch is not
        booked here, but by its batch.
        """
        self.headers, self._is_line = headers, is_line
        self.streams: list[TokenStream] = []
        self.parsed: list[ParsedAnswer] = []
        self._client = client
        self._record = record
        self._grant = grant
        self._extender: QuotaExtender | None = None  # of answers that may outgrow their reservation
        self._num_delivered: dict[TokenStream, int] = {}  # tokens, of stopped streams
        self._held = held

    def begin(self, fail: Callable[[ApiError], object]) -> None:
        """Start charging the sequences' use, and extending the reservations of answers of undeclared length."""
        answers = self._record.num_answers
        measure = partial(_usage, self._client.service, self.streams, self.parsed, self._num_delivered, answers)
        if self._is_line:
            self._record.engine.measure = measure
        else:
            self._grant.measure = measure
        sequences = [stream.sequence for stream in self.streams]
        if any(one.token_limit < one.request.most_tokens for one in sequences):
            admission = self._client.service.admission
            self._extender = QuotaExtender(self._grant, admission, lambda error: fail(refusal_of(error)))
            self._extender.watch(self.streams)
        promises = [timeline.promise for timeline in self._record.engine.timelines]
        self.headers = {**self.headers, **_estimate_headers(promises)}

    def stop(self, stream: TokenStream, num_tokens: int) -> None:
        self._num_delivered[stream] = num_tokens
        self._client.service.engine.finish_sequence(stream.sequence, FinishReason.STOP)

    async def settle(self) -> None:
        self.settle_now()

    def settle_now(self) -> None:
        self._end_extensions()
        self._record.engine.settling = self._client.service.telemetry.clock()
        self._grant.settle()

    def _end_extensions(self) -> None:
        if self._extender is not None:
            self._extender.close()

    def close(self) -> None:
        try:
            self._end_extensions()
            for stream in self.streams:
                self._client.service.engine.finish_sequence(stream.sequence)
            if self.streams and self.streams[0].sequence.request.sampling.grammar is not None:
                self._client.charge_masks(self.streams[0].sequence.tenant)
        finally:
            self._held.close()
            self._grant.close()


class InProcessCharge:
    """A charged request that needs no engine; see `RequestCharge`."""

    def __init__(self, grant: Grant, headers: Headers) -> None:
        self.headers = headers
        self.was_served = False
        self._grant = grant

    def close(self) -> None:
        if self.was_served:
            self._grant.measure = Usage
        self._grant.close()


class InProcessClient:
    """Calls an engine on the same event loop; see `EngineClient`, whose every promise is kept here."""

    def __init__(self, service: Service, health: Health) -> None:
        self.service = service
        self.refused_tenants: AbstractSet[str] = service.refusal_limiter.refused_tenants
        self._health = health
        self._unpaid: dict[str, float] = {}  # by tenant, seconds of a processor for its grammars
        for one in service.models.values():
            if one.grammars is not None:
                one.grammars.on_compiled.append(self._compiled)

    async def generate(
        self,
        request: EngineRequest,
        policy: EffectivePolicy,
        record: RequestRecord,
        fail: Callable[[ApiError], object],
        make_stream: MakeStream = TokenStream,
    ) -> InProcessGeneration:
        by = [at for at in (request.first_token_by, request.done_by) if at is not None]
        seconds = min(by) - self.service.engine.clock() if by else None
        model = self.service.models[self.service.model if request.model is None else request.model]
        try:
            async with _NO_TIMEOUT if seconds is None else asyncio.timeout(seconds):
                with ExitStack() as held:
                    if (grammar := request.sampling.grammar) is not None:
                        await self._hold_grammar(request, model, grammar, record, held)
                    sequences = self._prepare(request, model, policy)
                    if model.prompt_names is not None:
                        await model.prompt_names.name(sequences)
                    grant, headers = None, _NONE
                    limits = policy.charged_in(record.session, request.adapter or request.model)
                    if limits or request.attempt is not None:  # a router's request is settled where its replica is lost
                        grant = await self._reserve(request, sequences, policy, limits, record)
                        headers = policy.rate_headers.of(grant.states)
                    return self._admit(request, sequences, record, fail, grant, headers, make_stream, held.pop_all())
        except TimeoutError:
            raise DeadlineExceeded("The deadline of the request passed before it could be met.") from None

    async def _hold_grammar(
        self, request: EngineRequest, model: EngineModel, grammar: Grammar, record: RequestRecord, held: ExitStack
    ) -> None:
        """Have the request's grammar compiled and kept until `held` is closed. Raises `ApiError`."""
        record.engine.grammar = grammar
        began = self.service.telemetry.clock()
        try:
            await hold_grammar(model.grammars, grammar, request.key, held)
        finally:
            record.engine.grammar_wait = self.service.telemetry.clock() - began

    def _prepare(self, request: EngineRequest, model: EngineModel, policy: EffectivePolicy) -> list[Sequence]:
        """The sequences of a request, limited at first to the reservation of an answer of undeclared length.

        Announces the tenant, and its longest sequence if its KV memory is limited or was at its last request.
        """
        service = self.service
        adapter, draw = service.adapters.named(request.adapter, model.number), partial(service.seeds.getrandbits, 63)
        sequences = request.sequences(model.end_tokens, draw, adapter, model.number)
        if request.sampling.max_tokens is None:
            priced = request.adapter or request.model
            for one in sequences:
                expected = service.admission.expected_tokens(one.tenant, one.request.max_tokens)
                if (reservable := policy.reservable(one.num_prompt_tokens, expected, priced)) is not None:
                    one.limit_to(reservable)
        if policy.kv_bytes is not None or policy.name in service.kv_leases.leases:
            longest = max(one.request.most_tokens for one in sequences)
            blocks = service.core.scheduler.config.kv_blocks(longest, model.number)
            blocks += adapter.num_blocks if adapter else 0
            service.kv_leases.use(policy.name, policy.kv_bytes, blocks)
        service.cache_limiter.use(policy.name)
        if (names := model.prompt_names) is not None:
            if request.sampling.prompt_logprobs is None:
                names.begin(sequences, policy.cache_scope, request.cache_salt, adapter)
            else:
                names.begin_apart(sequences, policy.cache_scope)
        return sequences

    async def _reserve(
        self,
        request: EngineRequest,
        sequences: list[Sequence],
        policy: EffectivePolicy,
        limits: tuple[Limit, ...],
        record: RequestRecord,
    ) -> Grant:
        """Reserve the maximum that the sequences may use. Raises `ApiError`, and records the refusal in the event log.
        A request without limits is served even when the store is away.
        """
        record.engine.reserving = self.service.telemetry.clock()
        quotas, outage = self.service.quotas, policy.tenant.on_store_outage if limits else "open"
        try:
            ask = ask_of(sequences, request.num_answers, request.attempt, request.usage_row)
            return await quotas.reserve(policy.name, policy.key, limits, ask, outage)
        except QuotaError as error:
            if not limits:
                log.warning("a request is booked when it ends, and not if this replica is lost before: %s", error)
                return Grant(quotas, policy.name, policy.key, row=request.usage_row)
            self.service.core.requested(request.as_recorded(name_in_log(error)), self.service.engine.clock())
            raise _refusal(error, policy, request.id) from None

    def _admit(
        self,
        request: EngineRequest,
        sequences: list[Sequence],
        record: RequestRecord,
        fail: Callable[[ApiError], object],
        grant: Grant | None,
        headers: Headers,
        make_stream: MakeStream,
        held: ExitStack,
    ) -> InProcessGeneration:
        """Queue a request whose limits are charged; without a `grant`, no limit counts it. Raises as `generate`."""
        service = self.service
        grant = grant or Grant(service.quotas, request.tenant, request.key, row=request.usage_row)
        is_line = request.priority_class >= SPARE_CLASS
        generation = InProcessGeneration(self, record, grant, headers, held, is_line)
        try:
            record.engine.reserved = now = service.telemetry.clock()
            record.engine.grant = grant
            record.engine.beginnings, record.engine.usage_row = request.beginnings, request.usage_row
            if record.engine.reserving is None:
                record.engine.reserving = now
            service.core.requested(request.as_recorded(), now)
            for sequence in sequences:
                generation.streams.append(service.engine.submit(sequence, make_stream))
                record.engine.timelines.append(service.core_telemetry.timeline(sequence))
            if self._unpaid:
                self._charge_compiling(request.tenant, is_line)
            generation.begin(fail)
        except AdmissionRefused as error:
            generation.close()
            raise _with_headers(_of_admission(error, request), headers, request.id) from None
        except BaseException:
            generation.close()
            raise
        return generation

    def _compiled(self, tenant: str, seconds: float) -> None:
        """Keep the cost of a grammar until a sequence of the tenant is admitted, perhaps of a later request, and is
        charged for it.
        """
        self._unpaid[tenant] = self._unpaid.get(tenant, 0.0) + seconds

    def _charge_compiling(self, tenant: str, is_line: bool) -> None:
        if seconds := self._unpaid.pop(tenant, 0.0):
            self.service.admission.charge_side_work(tenant, seconds, is_line)

    def charge_masks(self, tenant: str) -> None:
        """Charge the processor time of masks for the tenant's rows since the last charge."""
        for one in self.service.models.values():
            if one.grammars is not None and (seconds := one.grammars.processes.mask_time.take_seconds(tenant)):
                self.service.admission.charge_side_work(tenant, seconds)

    async def refuse_unread(self, policy: EffectivePolicy, request_id: str) -> None:
        if not self.service.quotas.was_refused(policy.name, policy.key):
            return
        try:
            await self._refuse_spent(policy)
        except QuotaRefused as error:
            unread = JudgedRequest.unread(request_id, policy.name, policy.key, error.limit.name)
            self.service.core.requested(unread, self.service.engine.clock())
            raise _refusal(error, policy, request_id) from None

    async def refuse_spent(self, policy: EffectivePolicy) -> None:
        try:
            await self._refuse_spent(policy)
        except QuotaRefused as error:
            raise _refusal(error, policy) from None

    async def _refuse_spent(self, policy: EffectivePolicy) -> None:
        try:
            await self.service.quotas.refuse_spent(policy.name, policy.key, policy.charged_unread, MINIMUM_ASK)
        except StoreUnavailable as error:
            log.debug("whether a limit is spent is not known: %s", error)

    async def check_refusals(self, policy: EffectivePolicy) -> None:
        self.service.refusal_limiter.check(policy.name, policy.key)

    async def refused(self, error: ApiError, tenant: str | None, key: str | None, peer: str, num_bytes: int) -> float:
        return self.service.refusal_limiter.count(error, tenant, key, peer, num_bytes)

    async def charge(self, policy: EffectivePolicy, in_passing: bool = False) -> InProcessCharge:
        quotas, outage = self.service.quotas, policy.tenant.on_store_outage
        limits = policy.charged_in_passing if in_passing else policy.charged
        try:
            grant = await quotas.reserve(policy.name, policy.key, limits, Ask(), outage)
        except QuotaError as error:
            raise _refusal(error, policy) from None
        return InProcessCharge(grant, policy.rate_headers.of(grant.states))

    async def store_response(
        self,
        policy: EffectivePolicy,
        name: str,
        previous: str | None,
        contents: bytes,
        replaced: str | None = None,
        life: float = inf,
    ) -> Stored:
        limits = policy.tenant.stored_responses
        limits = replace(limits, retention=min(life, limits.retention))
        store = self.service.responses.store
        return await _said(store(policy.name, name, previous, contents, limits, replaced))

    async def read_responses(self, tenant: str, name: str, alone: bool) -> list[bytes] | None:
        stored = self.service.responses
        if not alone:
            return await _said(stored.read_turns(tenant, name))
        contents = await _said(stored.read(tenant, name))
        return None if contents is None else [contents]

    async def delete_response(self, tenant: str, name: str) -> bool:
        return await _said(self.service.responses.delete(tenant, name))

    async def open_response(self, tenant: str, what: str, name: str, most: int = 0) -> Held:
        return await _said(self.service.responses.ask_lease(tenant, what, name, most))

    async def batches(self, what: str, *told: Any) -> Any:
        return await _said(self.service.batches.call(what, *told))

    async def encode(self, asked: EncodingAsk, policy: EffectivePolicy) -> tuple[Headers, list[bytes]]:
        record = current.get()
        limits = policy.charged_in(record.session if record is not None else None, asked.model)
        quotas, outage = self.service.quotas, policy.tenant.on_store_outage if limits else "open"
        lengths, now = [len(one) for one in asked.inputs], self.service.telemetry.clock()
        queued = EncodingRequest(policy.name, lengths, now, policy.is_line)
        try:
            ask = Ask(0 if policy.is_line else 1, sum(queued.lengths), row=asked.usage_row)
            grant = await quotas.reserve(policy.name, policy.key, limits, ask, outage)
        except QuotaError as error:
            if limits:
                raise _refusal(error, policy) from None
            grant = Grant(quotas, policy.name, policy.key, row=asked.usage_row)
        try:
            within = asked.within - (self.service.telemetry.clock() - queued.arrival)
            vectors = await self.service.encoding.encode(asked._replace(within=within), queued)
        except ApiError as error:
            _with_headers(error, policy.rate_headers.of(grant.states), None)
            raise
        finally:
            if queued.tokens_taken and policy.is_line and record is not None:
                record.engine.measure, record.engine.usage_row = partial(Usage, queued.tokens_taken), asked.usage_row
            elif queued.tokens_taken:
                grant.measure = partial(Usage, queued.tokens_taken)
            grant.close()
        return policy.rate_headers.of(grant.states), vectors

    async def limit_states(self, policy: EffectivePolicy, session: str | None) -> tuple[LimitState, ...]:
        try:
            return await self.service.quotas.store.states(policy.name, policy.key, policy.charged_in(session))
        except QuotaError as error:
            raise refusal_of(error) from None

    async def kv_memory(self, policy: EffectivePolicy) -> KVMemory:
        kv, size, name = self.service.core.scheduler.kv_manager, self.service.kv_shape.block_bytes, policy.name
        pinned, allowed = kv.blocks.pinned_prefixes.idle_of(name), kv.allowances.allowed(name)
        kept = pinned + kv.cache.kept_of(name)
        leased = None if allowed is None else allowed * size
        return KVMemory((kv.allowances.held[name] - pinned) * size, kept * size, leased)

    async def load(self) -> LoadTotals:
        return self.service.metrics.replica.totals()

    async def health(self, probe: str) -> tuple[bool, Mapping[str, object]]:
        details = readiness(self.service) if probe == READY else {}
        return self._health.of(probe), details

    async def metrics_text(self) -> bytes:
        return await self.service.metrics.prometheus_text()


async def _said(asked: Awaitable[T]) -> T:
    """The store's answer. Raises `ApiError`."""
    try:
        return await asked
    except QuotaError as error:
        raise refusal_of(error) from None


def readiness(service: Service) -> dict[str, object]:
    """Warnings for the operator of a ready server; the log has the details."""
    policies, store = service.policies, service.quotas.store
    problem = "the edited policy is not valid, so the last valid one stays: see the log" if policies.problem else None
    return {
        "policy": {"version": policies.current.version, "problem": problem},
        "quota_store": "connected" if store.is_connected else "unavailable",
    }


def _usage(
    service: Service,
    streams: list[TokenStream],
    parsed: list[ParsedAnswer],
    num_delivered: dict[TokenStream, int],
    num_answers: int,
) -> Usage:
    """The use of a request so far; zero, even of requests, before anything was computed for it.

    A prompt's prefix-cache hits count among its input tokens once any of it was computed: the last token always is,
    unless it is forked. The `num_answers` consecutive streams of a prompt count it once, by the stream that came
    furthest. A stopped stream is charged its delivered tokens; any other, its generated ones.
    """
    now = service.engine.clock()
    processed, cached, generated, block_seconds = 0, 0, 0, 0.0
    for first in range(0, len(streams), num_answers):
        prefilled, found = 0, None
        for stream in streams[first : first + num_answers]:
            sequence = stream.sequence
            if sequence.num_billed_tokens or sequence.num_cached_tokens == sequence.num_prompt_tokens:
                prefilled = max(prefilled, sequence.num_prefilled_tokens)
                found = sequence.num_cached_tokens if found is None else min(found, sequence.num_cached_tokens)
            generated += num_delivered.get(stream, len(sequence.output))
            block_seconds += sequence.block_seconds(now)
        processed, cached = processed + prefilled, cached + (found or 0)
    byte_seconds = block_seconds * service.kv_shape.block_bytes
    reasoning = min(generated, sum([one.num_reasoning_tokens for one in parsed])) if parsed else 0
    return Usage(processed, generated, cached, byte_seconds, 1 if processed else 0, reasoning_tokens=reasoning)


def _refusal(error: QuotaError, policy: EffectivePolicy, logged_as: str | None = None) -> ApiError:
    headers = policy.rate_headers.of(error.measure()) if isinstance(error, QuotaRefused) else {}
    return _with_headers(refusal_of(error), headers, logged_as)


def _of_admission(error: AdmissionRefused, request: EngineRequest) -> ApiError:
    if isinstance(error, DeadlineInfeasible):
        return unmeetable(error, request.deadlines.is_relative)
    return queue_full(error, request.service_class) if isinstance(error, QueueFull) else refusal_of(error)


def _with_headers(error: ApiError, headers: Headers, logged_as: str | None) -> ApiError:
    error.rate_headers, error.logged_as = headers, logged_as
    return error


def _estimate_headers(promises: list[Promise]) -> dict[str, str]:
    """Headers with the milliseconds within which nine in ten first tokens, and last tokens, come."""
    first = [one.first_token for one in promises if one.first_token is not None]
    last = [one.last_token for one in promises if one.last_token is not None]
    estimates = {"x-sluice-estimate-ttft-ms": first, "x-sluice-estimate-ms": last}
    return {name: f"{1000 * max(seconds):.0f}" for name, seconds in estimates.items() if seconds}
