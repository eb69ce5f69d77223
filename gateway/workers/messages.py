"""Requests, records and errors as the lists that frames hold. An infinite time and an unknown one are both null."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from admission.outcome import Outcome
from backend.grammar import Grammar, GrammarKind
from backend.sampling_params import SamplingParams
from gateway.api.engine_request import ClientDeadlines, EngineRequest
from gateway.api.frontend import EncoderSetup, ServedModel
from gateway.errors import ApiError
from gateway.replica.fleet_secret import Beginnings
from gateway.settings.settings import Settings
from gateway.telemetry.request_record import RequestRecord, TraceContext
from gateway.tenants.key_store import KeyRecord
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import PolicyEdit
from quotas.reservation import Attempt

Message = list[Any]


@dataclass(slots=True)
class Setup:
    """The setup of an HTTP worker. It is pickled, and therefore never sent by a worker."""

    settings: Settings
    model: ServedModel
    model_dir: Path
    vocab_size: int
    encoders: list[EncoderSetup]
    pepper: bytes
    keys: list[KeyRecord]
    policy: Policy
    refused_tenants: set[str]
    refused_keys: set[tuple[str, str | None]]


@dataclass(slots=True)
class Update:
    """An edit of keys and policy; it is pickled like `Setup`."""

    keys: Sequence[KeyRecord] = ()
    revoked: Sequence[str] = ()
    policy: PolicyEdit | None = None


def error_message(error: ApiError) -> Message:
    return [type(error).__name__, vars(error)]


def error_of(message: Message) -> ApiError:
    """The error of a message, of the same class and attributes."""
    name, state = message
    (kind,) = [kind for kind in _subclasses(ApiError) if kind.__name__ == name]
    error: ApiError = kind.__new__(kind, state["message"])
    error.__dict__.update(state)
    return error


def _subclasses(kind: type[ApiError]) -> list[type[ApiError]]:
    """Returns a class with all that are derived from it."""
    return [kind, *(found for below in kind.__subclasses__() for found in _subclasses(below))]


def request_message(request: EngineRequest) -> tuple[Message, bytes]:
    """Returns a request as a message, and its token ids as 32-bit numbers."""
    sampling, deadlines = request.sampling, request.deadlines
    drawn = [
        sampling.max_tokens,
        sampling.min_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.seed,
        sampling.stop_token_ids,
        sampling.ignore_eos,
        _constraints(sampling),
    ]
    until = [_known(deadlines.first_token), _known(deadlines.last_token), _known(deadlines.interval)]
    token_ids = array("I")
    prompts = request.prompts[:: request.num_answers]
    for prompt in prompts:
        token_ids.extend(prompt)
    message = [
        request.id,
        request.tenant,
        request.key,
        [len(prompt) for prompt in prompts],
        request.max_tokens,
        drawn,
        request.service_tier,
        request.service_class,
        request.priority_class,
        request.token_interval,
        request.first_token_target,
        request.first_token_by,
        request.done_by,
        until,
        deadlines.is_relative,
        request.body_bytes,
        request.streams,
        request.may_stop,
        request.cache_salt,
        request.num_answers,
        request.expects_followup,
        request.attempt,
        [digest.hex() for digest in request.beginnings.digests],
        request.beginnings.num_bytes,
    ]
    return message, token_ids.tobytes()


def engine_request_of(message: Message, binary: memoryview) -> EngineRequest:
    """Returns the request of a message. Its stop strings stay with the worker, which looks for them."""
    name, tenant, key, lengths, max_tokens, drawn, tier, service_class, priority_class, *rest = message
    token_interval, first_token_target, first_token_by, done_by, until, is_relative, *others = rest
    token_ids, prompts, start = array("I", bytes(binary)).tolist(), [], 0
    body_bytes, streams, may_stop, cache_salt, num_answers, expects_followup, attempt, digests, prompt_bytes = others
    for length in lengths:
        prompts += [token_ids[start : start + length]] * num_answers
        start += length
    *numbers, stop_token_ids, ignore_eos, constraints = drawn
    sampling = _sampling(*numbers, tuple(stop_token_ids), ignore_eos)
    if constraints is not None:
        sampling = _constrained(sampling, *constraints)
    first, last, interval = (inf if seconds is None else seconds for seconds in until)
    deadlines = ClientDeadlines(first, last, interval, is_relative)
    return EngineRequest(
        id=name,
        tenant=tenant,
        key=key,
        prompts=prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        service_tier=tier,
        service_class=service_class,
        priority_class=priority_class,
        token_interval=token_interval,
        first_token_target=first_token_target,
        first_token_by=first_token_by,
        done_by=done_by,
        deadlines=deadlines,
        body_bytes=body_bytes,
        streams=streams,
        may_stop=may_stop,
        cache_salt=cache_salt,
        num_answers=num_answers,
        expects_followup=expects_followup,
        attempt=None if attempt is None else Attempt(*attempt),
        beginnings=Beginnings(tuple(map(bytes.fromhex, digests)), prompt_bytes),
    )


@lru_cache(1024)
def _sampling(
    max_tokens: int | None,
    min_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    presence_penalty: float,
    frequency_penalty: float,
    repetition_penalty: float,
    seed: int | None,
    stop_token_ids: tuple[int, ...],
    ignore_eos: bool,
) -> SamplingParams:
    """Sampling parameters, checked once for all requests with the same."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )


def _constraints(sampling: SamplingParams) -> Message | None:
    """The rarely used parameters; None without any."""
    bias, allowed, bad_words, grammar = (
        sampling.logit_bias,
        sampling.allowed_token_ids,
        sampling.bad_words,
        sampling.grammar,
    )
    asked = [bias, allowed, bad_words, sampling.logprobs, sampling.prompt_logprobs]
    if grammar is None and asked == [(), None, (), None, None]:
        return None
    return [*asked, None if grammar is None else [grammar.kind, grammar.source, grammar.owner]]


def _constrained(
    sampling: SamplingParams,
    bias: list[list[Any]],
    allowed: list[int] | None,
    bad_words: list[list[int]],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: list[str] | None,
) -> SamplingParams:
    return replace(
        sampling,
        logit_bias=tuple([(token_id, value) for token_id, value in bias]),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(map(tuple, bad_words)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=None if grammar is None else Grammar(GrammarKind(grammar[0]), *grammar[1:]),
    )


def record_message(record: RequestRecord) -> Message:
    """The record of a request as known when the engine is called, or at an end without the engine."""
    trace = record.trace
    return [
        record.request_id,
        record.method,
        record.path,
        [f"{trace.trace_id:x}", trace.span_id, trace.parent_id, trace.client_samples, trace.state],
        record.began,
        record.began_ns,
        record.num_retries,
        record.tenant,
        record.key,
        record.model,
        record.operation,
        record.streams,
        record.num_choices,
        record.num_answers,
        record.service_class,
        record.policy_version,
        record.response_id,
        record.body_bytes,
        record.authenticated,
        record.body_read,
        record.ignored,
    ]


def record_of(message: Message, sampling: SamplingParams | None = None) -> RequestRecord:
    request_id, method, path, trace, began, began_ns, num_retries, *known = message
    record = RequestRecord(
        request_id, method, path, TraceContext(int(trace[0], 16), *trace[1:]), began, began_ns, num_retries
    )
    record.tenant, record.key, record.model, record.operation, record.streams, record.num_choices = known[:6]
    record.num_answers, record.service_class, record.policy_version, record.response_id = known[6:10]
    record.body_bytes, record.authenticated, record.body_read, ignored = known[10:]
    record.ignored = tuple(ignored)
    record.sampling = sampling
    return record


def end_message(record: RequestRecord) -> Message:
    """The record of a request as known at its end."""
    error = None if record.error is None else error_message(record.error)
    ended_early = None if record.scope is None else record.scope.ended_early
    return [record.outcome, record.status, record.first_byte, record.ended, record.body_bytes, ended_early, error]


def end(record: RequestRecord, message: Message) -> tuple[Outcome, float]:
    """Complete a record by its end; returns its outcome and moment."""
    outcome, record.status, record.first_byte, ended, record.body_bytes, ended_early, error = message
    if record.scope is not None:
        record.scope.ended_early = ended_early
    record.error = None if error is None else error_of(error)
    return Outcome(outcome), ended


def _known(seconds: float) -> float | None:
    return seconds if seconds < inf else None
