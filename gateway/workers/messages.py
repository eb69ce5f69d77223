"""Requests, records and errors as the lists that frames hold. An infinite time and an unknown one are both null."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

from admission.outcome import Outcome
from backend.grammar import Grammar, GrammarKind
from backend.sampling_params import SamplingParams
from gateway.api.engine_request import ClientDeadlines, EngineRequest
from gateway.api.frontend import AdapterCard, EncoderSetup, ServedModel
from gateway.errors import ApiError, with_subclasses
from gateway.replica.fleet_secret import Beginnings
from gateway.settings.settings import Settings
from gateway.telemetry.request_record import GuardrailCall, GuardrailVerdict, RequestRecord, TraceContext
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
    adapters: dict[str, AdapterCard] = field(default_factory=dict)
    others: list[tuple[ServedModel, Path, int]] = field(default_factory=list)  # with directory and size of vocabulary


@dataclass(slots=True)
class Update:
    """An edit of keys, policy and adapters; it is pickled like `Setup`."""

    keys: Sequence[KeyRecord] = ()
    revoked: Sequence[str] = ()
    policy: PolicyEdit | None = None
    adapters: Mapping[str, AdapterCard] | None = None  # all of them


def error_message(error: ApiError) -> Message:
    return [type(error).__name__, vars(error)]


def error_of(message: Message) -> ApiError:
    """The error of a message, of the same class and attributes."""
    name, state = message
    (kind,) = [kind for kind in with_subclasses(ApiError) if kind.__name__ == name]
    error: ApiError = kind.__new__(kind, state["message"])
    error.__dict__.update(state)
    return error


# What crosses as it is, by the names of fields: each is a number, a text, a flag, null, or a list of numbers.
_OF_REQUEST = (
    "id", "tenant", "key", "max_tokens", "service_tier", "service_class", "priority_class", "token_interval",
    "first_token_target", "first_token_by", "done_by", "body_bytes", "streams", "may_stop", "may_reason", "cache_salt",
    "num_answers", "expects_followup", "usage_row", "adapter", "model",
)  # fmt: skip
_OF_SAMPLING = (  # and `stop_token_ids`
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos",
)  # fmt: skip
_OF_RECORD = (  # when the engine is asked, or when it ends without that
    "request_id", "method", "path", "began", "began_ns", "num_retries", "session", "tenant", "key", "model",
    "operation", "streams", "num_answers", "service_class", "policy_version", "response_id",
    "body_bytes", "authenticated", "body_read",
)  # fmt: skip
_asked = attrgetter("logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs")
_request, _drawn, _begun = (attrgetter(*names) for names in (_OF_REQUEST, _OF_SAMPLING, _OF_RECORD))


def request_message(request: EngineRequest) -> Message:
    """Returns a request as a message, without the ids of its prompts."""
    sampling, deadlines, beginnings = request.sampling, request.deadlines, request.beginnings
    return [
        _request(request),
        [len(prompt) for prompt in request.prompts[:: request.num_answers]],
        [_drawn(sampling), sampling.stop_token_ids, _constraints(sampling)],
        [_known(deadlines.first_token), _known(deadlines.last_token), _known(deadlines.interval)],
        deadlines.is_relative,
        request.attempt,
        [[digest.hex() for digest in beginnings.digests], beginnings.num_bytes],
    ]


def engine_request_of(message: Message) -> tuple[EngineRequest, list[int]]:
    """Returns the request of a message, whose prompts are empty yet, and their lengths. Its stop strings stay with the
    worker, which looks for them.
    """
    plain, lengths, (drawn, stop_token_ids, constraints), until, is_relative, attempt, (digests, num_bytes) = message
    fields = dict(zip(_OF_REQUEST, plain, strict=True))
    prompts = [prompt for prompt in [list[int]() for _ in lengths] for _ in range(fields["num_answers"])]
    sampling = _sampling(tuple(drawn), tuple(stop_token_ids))
    if constraints is not None:
        sampling = _constrained(sampling, *constraints)
    first, last, interval = (inf if seconds is None else seconds for seconds in until)
    request = EngineRequest(
        **fields,
        prompts=prompts,
        sampling=sampling,
        deadlines=ClientDeadlines(first, last, interval, is_relative),
        attempt=None if attempt is None else Attempt(*attempt),
        beginnings=Beginnings(tuple(map(bytes.fromhex, digests)), num_bytes),
    )
    return request, lengths


@lru_cache(1024)
def _sampling(drawn: tuple[Any, ...], stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Sampling parameters, checked once for all requests with the same."""
    return SamplingParams(**dict(zip(_OF_SAMPLING, drawn, strict=True)), stop_token_ids=stop_token_ids)


def _constraints(sampling: SamplingParams) -> Message | None:
    """The rarely used parameters; None without any."""
    grammar, asked = sampling.grammar, _asked(sampling)
    if grammar is None and asked == ((), None, (), None, None):
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
    ids = [f"{trace.trace_id:x}", trace.span_id, trace.parent_id, trace.client_samples, trace.state]
    return [_begun(record), ids, record.ignored]


def record_of(message: Message, sampling: SamplingParams | None = None) -> RequestRecord:
    plain, (trace_id, *ids), ignored = message
    fields = dict(zip(_OF_RECORD, plain, strict=True))
    return RequestRecord(
        **fields, trace=TraceContext(int(trace_id, 16), *ids), sampling=sampling, ignored=tuple(ignored)
    )


def end_message(record: RequestRecord) -> Message:
    """The record of a request as known at its end."""
    error = None if record.error is None else error_message(record.error)
    ended_early = None if record.scope is None else record.scope.ended_early
    moments, asked = [record.first_byte, record.ended], [[*call] for call in record.guardrail_calls]
    return [record.outcome, record.status, moments, record.body_bytes, asked, ended_early, error]


def end(record: RequestRecord, message: Message) -> tuple[Outcome, float]:
    """Complete a record by its end; returns its outcome and moment."""
    outcome, record.status, (record.first_byte, ended), record.body_bytes, asked, ended_early, error = message
    calls = [(stage, began, over, GuardrailVerdict(one)) for stage, began, over, one in asked]
    record.guardrail_calls = [GuardrailCall(*call) for call in calls]
    if record.scope is not None:
        record.scope.ended_early = ended_early
    record.error = None if error is None else error_of(error)
    return Outcome(outcome), ended


def parts(whole: bytes, sizes: list[int]) -> list[bytes]:
    """Cut what was joined into parts of these sizes."""
    return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _known(seconds: float) -> float | None:
    return seconds if seconds < inf else None
