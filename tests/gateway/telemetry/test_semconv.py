"""Dashboards, queries and other programs read these names: whoever changes one breaks them."""

from pathlib import Path

from gateway.telemetry import semconv

NAMES = """
SPAN_AUTH sluice.auth
SPAN_RESERVE sluice.quota.reserve
SPAN_QUEUE sluice.queue
SPAN_PREFILL sluice.prefill
SPAN_DECODE sluice.decode
SPAN_SETTLE sluice.quota.settle
SPAN_STEP sluice.engine.step
SPAN_ROUTE route
SPAN_ATTEMPT attempt
EVENT_BODY_READ body_read
EVENT_CHUNK chunk
EVENT_FIRST_BYTE first_byte
EVENT_FIRST_TOKEN first_token
EVENT_PREEMPTED preempted
EVENT_RESUMED resumed
EVENT_CANCELLED cancelled
EVENT_EXPIRED expired
SERVICE_NAME service.name
SERVICE_VERSION service.version
SERVICE_INSTANCE_ID service.instance.id
ERROR_TYPE error.type
HTTP_REQUEST_METHOD http.request.method
HTTP_ROUTE http.route
HTTP_RESPONSE_STATUS_CODE http.response.status_code
HTTP_REQUEST_RESEND_COUNT http.request.resend_count
URL_PATH url.path
SERVER_ADDRESS server.address
SERVER_PORT server.port
ROUTE_REPLICA sluice.route.replica
ROUTE_PREDICTED_MS sluice.route.predicted_ms
ROUTE_RETRY_BECAUSE sluice.route.retry_because
DB_SYSTEM_NAME db.system.name
DB_OPERATION_NAME db.operation.name
DB_STORED_PROCEDURE_NAME db.stored_procedure.name
GEN_AI_OPERATION_NAME gen_ai.operation.name
GEN_AI_PROVIDER_NAME gen_ai.provider.name
GEN_AI_OUTPUT_TYPE gen_ai.output.type
GEN_AI_REQUEST_MODEL gen_ai.request.model
GEN_AI_REQUEST_MAX_TOKENS gen_ai.request.max_tokens
GEN_AI_REQUEST_TEMPERATURE gen_ai.request.temperature
GEN_AI_REQUEST_TOP_P gen_ai.request.top_p
GEN_AI_REQUEST_TOP_K gen_ai.request.top_k
GEN_AI_REQUEST_SEED gen_ai.request.seed
GEN_AI_REQUEST_CHOICE_COUNT gen_ai.request.choice.count
GEN_AI_REQUEST_STREAM gen_ai.request.stream
GEN_AI_REQUEST_FREQUENCY_PENALTY gen_ai.request.frequency_penalty
GEN_AI_REQUEST_PRESENCE_PENALTY gen_ai.request.presence_penalty
GEN_AI_RESPONSE_ID gen_ai.response.id
GEN_AI_RESPONSE_MODEL gen_ai.response.model
GEN_AI_RESPONSE_FINISH_REASONS gen_ai.response.finish_reasons
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK gen_ai.response.time_to_first_chunk
GEN_AI_USAGE_INPUT_TOKENS gen_ai.usage.input_tokens
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS gen_ai.usage.cache_read.input_tokens
GEN_AI_USAGE_OUTPUT_TOKENS gen_ai.usage.output_tokens
REQUEST_ID sluice.request.id
TENANT_ID sluice.tenant.id
KEY_ID sluice.key.id
PRIORITY_CLASS sluice.priority.class
POLICY_VERSION sluice.policy.version
OUTCOME sluice.outcome
REFUSAL_CODE sluice.refusal.code
SAMPLED_BECAUSE sluice.sampled.because
QUEUE_WAIT_MS sluice.queue.wait_ms
DRR_DEFICIT sluice.drr.deficit
ESTIMATE_TTFT_MS sluice.estimate.ttft_ms
ESTIMATE_TOTAL_MS sluice.estimate.total_ms
ESTIMATE_TOKENS sluice.estimate.tokens
ESTIMATE_KV_BYTES sluice.estimate.kv_bytes
KV_PEAK_BYTES sluice.kv.peak_bytes
KV_BYTE_SECONDS sluice.kv.byte_seconds
ENGINE_TIME_US sluice.engine.time_us
PREEMPTIONS sluice.preemptions
CHUNKS sluice.prefill.chunks
SEQUENCES sluice.sequences
LOGPROBS sluice.request.logprobs
PROMPT_LOGPROBS sluice.request.prompt_logprobs
GRAMMAR_KIND sluice.grammar.kind
GRAMMAR_NAME sluice.grammar.name
GRAMMAR_WAIT_MS sluice.grammar.wait_ms
SEQUENCE_INDEX sluice.sequence.index
INPUT_TOKENS sluice.sequence.input_tokens
CACHED_TOKENS sluice.sequence.cached_tokens
OUTPUT_TOKENS sluice.sequence.output_tokens
JUMP_FORWARD_TOKENS sluice.sequence.jump_forward_tokens
STEP sluice.step.number
CHUNK_START sluice.chunk.start
CHUNK_TOKENS sluice.chunk.tokens
STEP_TRACES sluice.step.traces
STEP_SEQUENCES sluice.step.sequences
STEP_DECODES sluice.step.decodes
STEP_PREFILL_TOKENS sluice.step.prefill_tokens
STEP_ADMITTED sluice.step.admitted
STEP_DEVICE_US sluice.step.device_us
STEP_PLANNING_US sluice.step.planning_us
"""


def test_names_stay() -> None:
    pinned = dict(line.split() for line in NAMES.strip().splitlines())
    assert {name: value for name, value in vars(semconv).items() if name.isupper()} == pinned


def test_deprecated_names_are_not_used() -> None:
    used = {value for name, value in vars(semconv).items() if name.isupper()}
    assert used.isdisjoint({"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"})


def test_every_name_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")
    names = {value for name, value in vars(semconv).items() if name.isupper()}
    assert [name for name in sorted(names) if name not in text] == []
