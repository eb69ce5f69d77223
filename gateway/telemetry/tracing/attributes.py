"""The attributes of every span: each function returns those of one kind of span, by the names of `semconv`."""

from admission.outcome import Outcome
from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from gateway.telemetry import semconv
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import Chunk, RequestRecord, SequenceTimeline, StoreCall
from gateway.telemetry.tracing.http_attributes import of_http
from gateway.telemetry.tracing.span_tree import Attributes
from gateway.tenants.effective_policy import KVShape

PROVIDER = "sluice"


def of_failure(record: RequestRecord) -> dict[str, str]:
    """Returns why a request did not complete, in one of few words; nothing if it did."""
    error = record.error
    code = "" if error is None else error.code or error.type
    failure = {semconv.ERROR_TYPE: code or str(record.outcome)} if record.has_failed else {}
    if error is not None and record.outcome is not Outcome.FAILED:
        failure[semconv.REFUSAL_CODE] = code
    return failure


def of_request(record: RequestRecord, route: str, kv: KVShape, now: float) -> Attributes:
    sequences = [timeline.sequence for timeline in record.timelines]
    taken: Attributes = {
        semconv.KV_PEAK_BYTES: sum(sequence.peak_blocks for sequence in sequences) * kv.block_bytes,
        semconv.KV_BYTE_SECONDS: sum(sequence.block_seconds(now) for sequence in sequences) * kv.block_bytes,
        semconv.ENGINE_TIME_US: round(record.engine_time * 1e6),
        semconv.PREEMPTIONS: record.num_preemptions,
    }
    return {
        **of_http(record, route),
        semconv.PRIORITY_CLASS: record.service_class,
        semconv.POLICY_VERSION: record.policy_version,
        **of_failure(record),
        **(taken if sequences else {semconv.GEN_AI_REQUEST_MODEL: record.model}),
    }


def of_step(step: CompletedStep) -> dict[str, int]:
    return {
        semconv.STEP: step.scheduled.batch.step,
        semconv.STEP_SEQUENCES: step.num_sequences,
        semconv.STEP_DECODES: step.num_decodes,
        semconv.STEP_PREFILL_TOKENS: step.prefill_tokens,
        semconv.STEP_ADMITTED: len(step.scheduled.admitted),
        semconv.STEP_DEVICE_US: round(step.elapsed * 1e6),
        semconv.STEP_PLANNING_US: round(step.planning * 1e6),
    }


def _estimate(record: RequestRecord, kv: KVShape) -> Attributes:
    """Returns the estimates made when the request was queued, and the tokens and KV memory reserved for it."""
    sequences = [timeline.sequence for timeline in record.timelines]
    first = [sequence.first_token_estimate for sequence in sequences if sequence.first_token_estimate is not None]
    last = [sequence.last_token_estimate for sequence in sequences if sequence.last_token_estimate is not None]
    reservation = None if record.grant is None else record.grant.reservation
    if reservation is None:
        tokens = sum(sequence.token_limit for sequence in sequences)
    else:
        tokens = reservation.ask.input_tokens + reservation.ask.output_tokens
    return {
        semconv.ESTIMATE_TTFT_MS: 1000 * max(first) if first else None,
        semconv.ESTIMATE_TOTAL_MS: 1000 * max(last) if last else None,
        semconv.ESTIMATE_TOKENS: tokens,
        semconv.ESTIMATE_KV_BYTES: -(-tokens // kv.block_tokens) * kv.block_bytes,
    }


def of_queue(record: RequestRecord, kv: KVShape, waited: float) -> Attributes:
    credits_ = [timeline.credit for timeline in record.timelines if timeline.credit is not None]
    return {
        semconv.QUEUE_WAIT_MS: 1000 * waited,
        semconv.PRIORITY_CLASS: record.service_class,
        semconv.DRR_DEFICIT: credits_[0] if credits_ else None,
        **_estimate(record, kv),
    }


def of_generation(record: RequestRecord) -> Attributes:
    reasons = [timeline.sequence.finish_reason for timeline in record.timelines]
    first_byte = None if record.first_byte is None else record.first_byte - record.began
    return {
        semconv.GEN_AI_OPERATION_NAME: record.operation,
        semconv.GEN_AI_PROVIDER_NAME: PROVIDER,
        semconv.GEN_AI_OUTPUT_TYPE: "text",
        semconv.GEN_AI_REQUEST_MODEL: record.model,
        semconv.GEN_AI_REQUEST_STREAM: record.streams or None,
        semconv.GEN_AI_REQUEST_CHOICE_COUNT: record.num_choices if record.num_choices > 1 else None,
        **({} if record.sampling is None else _of_sampling(record.sampling)),
        **({} if record.grammar is None else _of_grammar(record.grammar, record.grammar_wait)),
        semconv.GEN_AI_RESPONSE_ID: record.response_id,
        semconv.GEN_AI_RESPONSE_MODEL: record.model,
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [reason.value for reason in reasons if reason is not None] or None,
        semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: first_byte if record.streams else None,
        semconv.GEN_AI_USAGE_INPUT_TOKENS: record.num_prompt_tokens,
        semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: record.num_cached_tokens or None,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: record.num_output_tokens,
        semconv.TENANT_ID: record.tenant,
        semconv.SEQUENCES: len(record.timelines) if len(record.timelines) > 1 else None,
    }


def _of_sampling(sampling: SamplingParams) -> Attributes:
    return {
        semconv.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        semconv.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        semconv.GEN_AI_REQUEST_TOP_K: sampling.top_k if sampling.top_k > 0 else None,
        semconv.GEN_AI_REQUEST_SEED: sampling.seed,
        semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
        semconv.LOGPROBS: sampling.logprobs,
        semconv.PROMPT_LOGPROBS: sampling.prompt_logprobs,
    }


def _of_grammar(grammar: Grammar, wait: float | None) -> Attributes:
    return {
        semconv.GRAMMAR_KIND: grammar.kind.value,
        semconv.GRAMMAR_NAME: grammar.name,
        semconv.GRAMMAR_WAIT_MS: None if wait is None else 1000 * wait,
    }


def of_prefill(timeline: SequenceTimeline) -> Attributes:
    return {
        semconv.INPUT_TOKENS: len(timeline.sequence.prompt),
        semconv.CACHED_TOKENS: timeline.sequence.num_cached_tokens or None,
        semconv.CHUNKS: len(timeline.chunks),
    }


def of_decode(timeline: SequenceTimeline) -> Attributes:
    return {
        semconv.OUTPUT_TOKENS: len(timeline.sequence.output),
        semconv.JUMP_FORWARD_TOKENS: timeline.sequence.num_jumped_tokens or None,
        semconv.PREEMPTIONS: timeline.sequence.num_preemptions or None,
    }


def of_chunk(chunk: Chunk) -> dict[str, int]:
    return {semconv.STEP: chunk.step, semconv.CHUNK_START: chunk.start, semconv.CHUNK_TOKENS: chunk.length}


def of_store_call(call: StoreCall) -> Attributes:
    return {
        semconv.DB_SYSTEM_NAME: "redis",
        semconv.DB_OPERATION_NAME: "EVALSHA",
        semconv.DB_STORED_PROCEDURE_NAME: call.name,
        semconv.ERROR_TYPE: call.error,
    }
