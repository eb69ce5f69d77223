"""What spans of a request say beside their names and times."""

from admission.outcome import Outcome
from backend.sampling_params import SamplingParams
from gateway.openai.requests import CompletionRequest
from gateway.telemetry import semconv
from gateway.telemetry.request_record import Chunk, StoreCall, Story, Trail
from gateway.telemetry.tracing.span_tree import Attributes
from gateway.tenants.effective_policy import KvShape

PROVIDER = "sluice"


def of_failure(story: Story) -> dict[str, str]:
    """Why a request did not complete, in words of which there are few; nothing when it did."""
    error = story.error
    code = "" if error is None else error.code or error.type
    failure = {semconv.ERROR_TYPE: code or str(story.outcome)} if story.has_failed else {}
    if error is not None and story.outcome is not Outcome.FAILED:
        failure[semconv.REFUSAL_CODE] = code
    return failure


def of_request(story: Story, route: str, kv: KvShape, now: float) -> Attributes:
    sequences = [trail.sequence for trail in story.trails]
    taken: Attributes = {
        semconv.KV_PEAK_BYTES: sum(sequence.peak_blocks for sequence in sequences) * kv.block_bytes,
        semconv.KV_BYTE_SECONDS: sum(sequence.block_seconds(now) for sequence in sequences) * kv.block_bytes,
        semconv.ENGINE_TIME_US: round(story.engine_time * 1e6),
        semconv.PREEMPTIONS: story.num_preemptions,
    }
    return {
        semconv.HTTP_REQUEST_METHOD: story.method,
        semconv.HTTP_ROUTE: route,
        semconv.URL_PATH: story.path,
        semconv.HTTP_RESPONSE_STATUS_CODE: story.status or None,
        semconv.HTTP_REQUEST_RESEND_COUNT: story.num_retries or None,
        semconv.REQUEST_ID: story.request_id,
        semconv.TENANT_ID: story.tenant,
        semconv.KEY_ID: story.key,
        semconv.PRIORITY_CLASS: story.service_class,
        semconv.POLICY_VERSION: story.policy_version,
        semconv.OUTCOME: None if story.outcome is None else story.outcome.value,
        **of_failure(story),
        **(taken if sequences else {semconv.GEN_AI_REQUEST_MODEL: story.model}),
    }


def _estimate(story: Story, kv: KvShape) -> Attributes:
    """What was expected when it entered the queue, and what was set aside for it."""
    sequences = [trail.sequence for trail in story.trails]
    first = [sequence.promised_first for sequence in sequences if sequence.promised_first is not None]
    last = [sequence.promised_last for sequence in sequences if sequence.promised_last is not None]
    reservation = None if story.grant is None else story.grant.reservation
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


def of_queue(story: Story, kv: KvShape, waited: float) -> Attributes:
    standings = [trail.standing for trail in story.trails if trail.standing is not None]
    return {
        semconv.QUEUE_WAIT_MS: 1000 * waited,
        semconv.PRIORITY_CLASS: story.service_class,
        semconv.DRR_DEFICIT: standings[0] if standings else None,
        **_estimate(story, kv),
    }


def of_generation(story: Story) -> Attributes:
    request = story.request
    reasons = [trail.sequence.finish_reason for trail in story.trails]
    streams = request is not None and request.stream
    first_byte = None if story.first_byte is None else story.first_byte - story.began
    return {
        semconv.GEN_AI_OPERATION_NAME: story.operation,
        semconv.GEN_AI_PROVIDER_NAME: PROVIDER,
        semconv.GEN_AI_OUTPUT_TYPE: "text",
        semconv.GEN_AI_REQUEST_MODEL: story.model,
        semconv.GEN_AI_REQUEST_STREAM: streams or None,
        semconv.GEN_AI_REQUEST_CHOICE_COUNT: _choices(story),
        **({} if request is None else _of_sampling(request.sampling)),
        semconv.GEN_AI_RESPONSE_ID: story.response_id,
        semconv.GEN_AI_RESPONSE_MODEL: story.model,
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [reason.value for reason in reasons if reason is not None] or None,
        semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: first_byte if streams else None,
        semconv.GEN_AI_USAGE_INPUT_TOKENS: story.num_prompt_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: story.num_output_tokens,
        semconv.TENANT_ID: story.tenant,
        semconv.SEQUENCES: len(story.trails) if len(story.trails) > 1 else None,
    }


def _choices(story: Story) -> int | None:
    """The conventions want it where it is not 1."""
    request = story.request
    return len(request.prompts) if isinstance(request, CompletionRequest) and len(request.prompts) > 1 else None


def _of_sampling(sampling: SamplingParams) -> Attributes:
    return {
        semconv.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        semconv.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        semconv.GEN_AI_REQUEST_TOP_K: sampling.top_k if sampling.top_k > 0 else None,
        semconv.GEN_AI_REQUEST_SEED: sampling.seed,
        semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
    }


def of_prefill(trail: Trail) -> Attributes:
    return {semconv.INPUT_TOKENS: len(trail.sequence.prompt), semconv.CHUNKS: len(trail.chunks)}


def of_decode(trail: Trail) -> Attributes:
    return {
        semconv.OUTPUT_TOKENS: len(trail.sequence.output),
        semconv.PREEMPTIONS: trail.sequence.num_preemptions or None,
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
