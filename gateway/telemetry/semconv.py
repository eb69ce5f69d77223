"""The names of spans, attributes and events. A test pins them, because dashboards and queries are written against them.

They follow the OpenTelemetry GenAI, HTTP and database conventions as of August 2026 (GenAI: status Development; the
package of constants on PyPI still has older names). Names below `sluice.` are ours, since no standard has them.
"""

# resource
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"

# spans of one request
SPAN_AUTH = "sluice.auth"
SPAN_RESERVE = "sluice.quota.reserve"
SPAN_QUEUE = "sluice.queue"
SPAN_PREFILL = "sluice.prefill"
SPAN_DECODE = "sluice.decode"
SPAN_SETTLE = "sluice.quota.settle"

# spans of a router
SPAN_ROUTE = "route"
SPAN_ATTEMPT = "attempt"

# a span of its own trace, linked to the requests that it served
SPAN_STEP = "sluice.engine.step"

# events
EVENT_BODY_READ = "body_read"
EVENT_FIRST_BYTE = "first_byte"
EVENT_CHUNK = "chunk"
EVENT_FIRST_TOKEN = "first_token"  # noqa: S105
EVENT_PREEMPTED = "preempted"
EVENT_RESUMED = "resumed"
EVENT_CANCELLED = "cancelled"
EVENT_EXPIRED = "expired"

# of any span
ERROR_TYPE = "error.type"

# HTTP
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_REQUEST_RESEND_COUNT = "http.request.resend_count"
URL_PATH = "url.path"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# database
DB_SYSTEM_NAME = "db.system.name"
DB_OPERATION_NAME = "db.operation.name"
DB_STORED_PROCEDURE_NAME = "db.stored_procedure.name"

# generation
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_OUTPUT_TYPE = "gen_ai.output.type"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# ours: who asked, and what came of it
REQUEST_ID = "sluice.request.id"
TENANT_ID = "sluice.tenant.id"
KEY_ID = "sluice.key.id"
PRIORITY_CLASS = "sluice.priority.class"
POLICY_VERSION = "sluice.policy.version"
OUTCOME = "sluice.outcome"
REFUSAL_CODE = "sluice.refusal.code"
SAMPLED_BECAUSE = "sluice.sampled.because"

# ours: the queue, and what was expected when it was entered
QUEUE_WAIT_MS = "sluice.queue.wait_ms"
DRR_DEFICIT = "sluice.drr.deficit"  # the tenant's credit at admission, in engine seconds for each unit of its weight
ESTIMATE_TTFT_MS = "sluice.estimate.ttft_ms"
ESTIMATE_TOTAL_MS = "sluice.estimate.total_ms"
ESTIMATE_TOKENS = "sluice.estimate.tokens"
ESTIMATE_KV_BYTES = "sluice.estimate.kv_bytes"

# ours: where a router has sent it
ROUTE_REPLICA = "sluice.route.replica"
ROUTE_PREDICTED_MS = "sluice.route.predicted_ms"  # until the first token
ROUTE_RETRY_BECAUSE = "sluice.route.retry_because"

# ours: what it took
KV_PEAK_BYTES = "sluice.kv.peak_bytes"
KV_BYTE_SECONDS = "sluice.kv.byte_seconds"
ENGINE_TIME_US = "sluice.engine.time_us"
PREEMPTIONS = "sluice.preemptions"
CHUNKS = "sluice.prefill.chunks"
SEQUENCES = "sluice.sequences"
LOGPROBS = "sluice.request.logprobs"
PROMPT_LOGPROBS = "sluice.request.prompt_logprobs"
GRAMMAR_KIND = "sluice.grammar.kind"
GRAMMAR_NAME = "sluice.grammar.name"
GRAMMAR_WAIT_MS = "sluice.grammar.wait_ms"
SEQUENCE_INDEX = "sluice.sequence.index"
INPUT_TOKENS = "sluice.sequence.input_tokens"
CACHED_TOKENS = "sluice.sequence.cached_tokens"
OUTPUT_TOKENS = "sluice.sequence.output_tokens"
JUMP_FORWARD_TOKENS = "sluice.sequence.jump_forward_tokens"

# ours: one step of the engine, and a chunk's place in it
STEP = "sluice.step.number"
CHUNK_START = "sluice.chunk.start"
CHUNK_TOKENS = "sluice.chunk.tokens"
STEP_TRACES = "sluice.step.traces"  # the linked traces, for backends that drop links
STEP_SEQUENCES = "sluice.step.sequences"
STEP_DECODES = "sluice.step.decodes"
STEP_PREFILL_TOKENS = "sluice.step.prefill_tokens"
STEP_ADMITTED = "sluice.step.admitted"
STEP_DEVICE_US = "sluice.step.device_us"
STEP_PLANNING_US = "sluice.step.planning_us"
