"""Every setting of the gateway: type, unit, default and meaning.

The setting `max_num_seqs` is the variable `SLUICE_MAX_NUM_SEQS` and the flag `--max-num-seqs`. A flag wins over a
variable, a variable over the default. What depends on the model is checked by the engine's own configuration.
"""

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway import otel_variables
from gateway.cores import spare_cores

ENV_PREFIX = "SLUICE_"
GROUPS = ("model", "engine", "memory", "quotas", "network", "security", "admin", "logging", "telemetry")
ADMIN_CONNECTIONS = 32
SPARE_FILES = 64 + ADMIN_CONNECTIONS  # descriptors kept for weights, logs and libraries beside the connections
MOST_CONNECTIONS = 4096  # by default
LEAST_CONNECTIONS = 16  # which a default is not below


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _setting(group: str, unit: str, default: Any, description: str, **limits: Any) -> Any:
    """A field; a callable default is called at start. `unit` is what the help shows for the value; empty: no flag."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**made, description=description, json_schema_extra={"group": group, "unit": unit}, **limits)


def _standard(name: str, default: str | None = None) -> Callable[[], str | None]:
    """The value of a variable that OpenTelemetry has a standard name for."""
    return lambda: os.environ.get(name) or default


def _otlp_protocol(value: object) -> object:
    return "http" if value == "http/protobuf" else value


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/sluice`, or `~/.local/state/sluice` (XDG base directory specification)."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "sluice"


def most_connections() -> int:
    """As many as this process may open files for, within what is sensible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(LEAST_CONNECTIONS, hard - SPARE_FILES))


IntOrAuto = Annotated[int | None, BeforeValidator(_auto)]  # None: auto
ChunkOrAuto = Annotated[Annotated[int, Field(ge=1)] | Literal["off"] | None, BeforeValidator(_auto)]
BytesOrAuto = Annotated[ByteSize | None, BeforeValidator(_auto)]
FractionOrAuto = Annotated[float | None, BeforeValidator(_auto)]
NameOrAuto = Annotated[str | None, BeforeValidator(_auto)]
PathOrAuto = Annotated[Path | None, BeforeValidator(_auto)]
UrlOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]
PortOrOff = Annotated[int, Field(ge=0, le=65_535)] | Literal["off"]
SecretOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]


class SettingFields(BaseSettings):
    """What an operator may choose. Frozen; read once at start."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    model: str = _setting(
        "model",
        "MODEL",
        "embedded",
        "embedded, a local directory in Hugging Face layout, or a hub name such as Qwen/Qwen3-0.6B",
        min_length=1,
    )
    served_model_name: NameOrAuto = _setting(
        "model", "NAME", None, "the name clients ask for; auto: the model's own name", min_length=1, max_length=256
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = _setting(
        "model",
        "DTYPE",
        "auto",
        "precision of weights, and of the KV cache unless --kv-cache-dtype says another; auto: float32 on a CPU, where "
        "then no text depends on its batch; as stored on a GPU",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "model", "DEVICE", "auto", "where the model runs; auto: an NVIDIA GPU if torch finds one, else the CPU"
    )
    max_model_len: IntOrAuto = _setting(
        "model",
        "TOKENS",
        None,
        "most tokens of prompt and answer together; auto: the model's positions, or what KV memory holds",
        ge=2,
    )

    max_num_seqs: int = _setting("engine", "N", 256, "most sequences in one step", ge=1, le=65_536)
    max_num_batched_tokens: IntOrAuto = _setting(
        "engine",
        "TOKENS",
        None,
        "token budget: most tokens computed in one step; auto: 512, or as others need",
        ge=1,
        le=1_048_576,
    )
    prefill_chunk: ChunkOrAuto = _setting(
        "engine",
        "TOKENS",
        None,
        "most prompt tokens of one sequence in one step; auto: the token budget; off: every prompt whole",
    )
    prefill_share: float = _setting(
        "engine",
        "SHARE",
        1.0,
        "of the token budget, that prompts may fill beside running answers whose class has no time per token to keep; "
        "the rest is a reserve for decodes",
        gt=0,
        le=1,
    )
    default_max_tokens: IntOrAuto = _setting(
        "engine",
        "TOKENS",
        None,
        "max_tokens of a request that names none; auto: what its context leaves a chat, 16 for a completion",
        ge=1,
    )
    max_waiting: int = _setting(
        "engine",
        "N",
        1024,
        "most requests that wait for the engine; more are answered 503, unless of a tenant within its equal share; the "
        "policy's classes have bounds of their own, the default ones 256, 1024 and 4096 requests",
        ge=1,
    )
    order: Literal[
        "fair",
        "fcfs",
        "round_robin",
        "shortest_first",
        "vtc",
        "virtual_finish",
        "earliest_deadline",
        "adaptive_lifo",
    ] = _setting(
        "engine",
        "HOW",
        "fair",
        "who is admitted next: fair among tenants by deficit round robin, or another ordering to measure it by "
        "(see `sluice simulate`)",
    )
    charge: Literal["engine_time", "tokens"] = _setting(
        "engine", "UNIT", "engine_time", "what tenants' shares are counted in"
    )
    admit: Literal["forecast", "minimum_free", "optimistic"] = _setting(
        "engine",
        "HOW",
        "forecast",
        "to KV memory: by a forecast of what those running will need, while --min-free-blocks are free, or whenever a "
        "prompt fits",
    )
    min_free_blocks: int = _setting("engine", "N", 0, "KV blocks that --admit minimum_free leaves free", ge=0)
    overload: Literal["deadline", "controlled_delay", "bounded", "unbounded"] = _setting(
        "engine",
        "HOW",
        "deadline",
        "of more work than the machine can do: refuse what would be late, give up what has waited too long (CoDel), "
        "bound the queue alone, or nothing; unbounded lifts max_waiting and the queues of the policy's classes, the "
        "others keep both",
    )
    batching: Literal["continuous", "static"] = _setting(
        "engine", "HOW", "continuous", "static admits no sequence until a whole batch is done: a baseline to measure by"
    )
    kernels: Literal["auto", "native", "triton", "torch", "reference"] = _setting(
        "engine",
        "HOW",
        "auto",
        "native: compiled, CPU; triton: GPU; torch: no compiler needed; reference: slow oracle; auto: the best",
    )
    threads: int = _setting(
        "engine",
        "N",
        spare_cores,
        "CPU threads of the model: all cores but one, which serves the clients",
        ge=1,
        le=1024,
    )
    step_timeout: float = _setting(
        "engine",
        "SECONDS",
        120.0,
        "time for one step of the model, or twenty times as long as is expected of it where that is more, after which "
        "the device counts as wedged and the process ends with an error",
        ge=1,
        le=86_400,
    )
    seed: int = _setting(
        "engine", "N", 0, "seeds the sampling of requests that bring no seed of their own", ge=0, lt=2**63
    )

    kv_cache_dtype: Literal["auto", "fp8"] = _setting(
        "memory",
        "DTYPE",
        "auto",
        "precision of the KV cache; auto: that of the model; fp8: e4m3 without scales, half of the memory of 16 bits, "
        "rounded to 4 significant bits, which can change texts",
    )
    kv_memory_bytes: BytesOrAuto = _setting(
        "memory", "BYTES", None, "memory of the KV cache, such as 512MiB or 2GiB; auto: see --kv-memory-fraction", gt=0
    )
    kv_memory_fraction: FractionOrAuto = _setting(
        "memory",
        "FRACTION",
        None,
        "the same as a share of the free memory; auto: a quarter and at most 1 GiB, on a GPU all that is of use",
        gt=0,
        lt=1,
    )
    block_size: int = _setting("memory", "TOKENS", 16, "tokens in one block of the KV cache", ge=1, le=1024)
    kv_allocation: Literal["paged", "contiguous"] = _setting(
        "memory", "HOW", "paged", "contiguous reserves a whole context for every sequence: a baseline to measure by"
    )

    policy: PathOrAuto = _setting(
        "quotas",
        "PATH",
        None,
        "policy file, or folder of them: classes, tenants and their limits; edits take effect while serving; auto: "
        "the built-in policy, which limits nobody",
    )
    redis_url: UrlOrAuto = _setting(
        "quotas",
        "URL",
        None,
        "Redis or Valkey that replicas keep quotas in: redis://, rediss:// or unix://; auto: a private server in DIR",
    )
    redis_timeout: float = _setting(
        "quotas", "SECONDS", 0.25, "longest wait for the quota store before its outage begins", gt=0, le=10
    )
    quota_lease: float = _setting(
        "quotas",
        "SECONDS",
        30.0,
        "after which what a crashed replica held is free again, and for which an outage of the store is bridged",
        ge=3,
        le=3600,
    )

    host: str = _setting("network", "HOST", "127.0.0.1", "address to listen on", min_length=1)
    port: int = _setting("network", "PORT", 8000, "port to listen on; 0: any free one", ge=0, le=65_535)
    max_connections: int = _setting(
        "network",
        "N",
        most_connections,
        "most connections at once; for one more another is closed, first of those that have shown no key",
        ge=1,
    )
    max_connections_per_peer: IntOrAuto = _setting(
        "network",
        "N",
        None,
        "most connections of one address; auto: half of --max-connections, and all of it for this machine's own",
        ge=1,
    )
    max_body_bytes: ByteSize = _setting(
        "network", "BYTES", ByteSize(4 * 2**20), "largest request body; a larger one is answered 413", ge=1024
    )
    max_unparsed_bytes: ByteSize = _setting(
        "network",
        "BYTES",
        ByteSize(64 * 2**20),
        "request bodies of one tenant that are read and not parsed yet, half of it of each key; a body of more than "
        "64KiB waits for its part of it",
        ge=2048,
    )
    refused_per_second: float = _setting(
        "network",
        "N",
        20.0,
        "requests of an API key that may be refused in a second, twice as many of its tenant, before more are answered "
        "429 unread, and of an address without a good key, before its answers wait; 64KiB of body count one more",
        ge=1,
        le=1_000_000,
    )
    header_timeout: float = _setting(
        "network", "SECONDS", 10.0, "time for a client to send its request's headers", gt=0, le=3600
    )
    idle_timeout: float = _setting(
        "network", "SECONDS", 75.0, "time a connection may stay open between two requests", gt=0, le=86_400
    )
    body_timeout: float = _setting(
        "network", "SECONDS", 30.0, "time without progress after which a request's body is given up", gt=0, le=3600
    )
    write_timeout: float = _setting(
        "network",
        "SECONDS",
        30.0,
        "time without progress after which a client that reads nothing is cut",
        gt=0,
        le=3600,
    )
    drain_delay: float = _setting(
        "network",
        "SECONDS",
        0.0,
        "how long a server that is told to stop serves on while it says it is not ready, so that balancers hear of it",
        ge=0,
        le=3600,
    )
    drain_timeout: float = _setting(
        "network",
        "SECONDS",
        30.0,
        "time for requests in flight to end by themselves, after that delay, before they are ended with an error",
        ge=0,
        le=86_400,
    )
    tls_cert_file: Path | None = _setting("network", "FILE", None, "certificate chain (PEM); turns TLS on")
    tls_key_file: Path | None = _setting("network", "FILE", None, "private key of the certificate (PEM)")

    state_dir: Path = _setting(
        "security",
        "DIR",
        default_state_dir,
        "where the pepper, hashes of API keys, the admin key, the audit log, step times and the private store are kept",
    )
    demo_key: SecretOrAuto = _setting(
        "security",
        "KEY",
        None,
        "API key of the tenant demo; auto: made at first start, on a loopback address only",
    )
    pepper: SecretOrAuto = _setting(
        "security", "", None, "secret that API keys are hashed with, where replicas share it; auto: DIR/pepper"
    )

    admin_host: str = _setting(
        "admin", "HOST", "127.0.0.1", "address that the admin API and its page listen on", min_length=1
    )
    admin_port: PortOrOff = _setting(
        "admin", "PORT", 8001, "port of the admin API and its page; 0: any free one; off: none"
    )
    admin_key: SecretOrAuto = _setting("admin", "", None, "key of the admin API; auto: DIR/admin-key, made when needed")

    event_log: Path | None = _setting(
        "logging", "FILE", None, "record the scheduler's events and decisions here, for `sluice explain` and `replay`"
    )
    event_log_bytes: ByteSize = _setting(
        "logging",
        "BYTES",
        ByteSize(64 * 2**20),
        "size at which the event log is rotated; 8 old segments are kept",
        ge=65_536,
    )
    log_level: Literal["auto", "debug", "info", "warning", "error"] = _setting(
        "logging", "LEVEL", "auto", "least severe message that is logged; auto: info, with --dev debug"
    )
    log_format: Literal["auto", "json", "text"] = _setting(
        "logging", "FORMAT", "auto", "of the messages on stderr; auto: text on a terminal and with --dev, else json"
    )
    dev: bool = _setting(
        "logging", "BOOL", False, "for development: readable logs, down to debug messages and what errors say"
    )

    metrics_on_tenant_port: bool = _setting(
        "telemetry", "true|false", False, "serve /metrics to tenants as well; it names all of them"
    )
    metrics_interval: float = _setting(
        "telemetry",
        "SECONDS",
        partial(otel_variables.milliseconds, "OTEL_METRIC_EXPORT_INTERVAL", 15.0),
        "between two pushes of the metrics to the collector",
        ge=1,
        le=3600,
    )
    otlp_endpoint: str | None = _setting(
        "telemetry",
        "URL",
        _standard("OTEL_EXPORTER_OTLP_ENDPOINT"),
        "OpenTelemetry collector that spans and metrics are sent to, such as http://localhost:4317 for grpc and "
        "http://localhost:4318 for http; nothing is sent without one",
    )
    otlp_protocol: Annotated[Literal["grpc", "http"], BeforeValidator(_otlp_protocol)] = _setting(
        "telemetry",
        "HOW",
        _standard("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        "how the collector is spoken to: OTLP over gRPC, or protobuf over HTTP",
    )
    otlp_headers: SecretStr | None = _setting(
        "telemetry", "", None, "headers for the collector, such as authorization=Bearer%20...: NAME=VALUE,NAME=VALUE"
    )
    trace_sample_ratio: float = _setting(
        "telemetry",
        "SHARE",
        partial(otel_variables.sample_ratio, 0.01),
        "of requests without a trace of their own, that are traced",
        ge=0,
        le=1,
    )
    trace_slow_seconds: float = _setting(
        "telemetry",
        "SECONDS",
        2.0,
        "wait for a first token, for memory or for the client to read, from which a request is traced anyway",
        gt=0,
        le=86_400,
    )
    trace_max_per_second: float = _setting(
        "telemetry",
        "N",
        40.0,
        "most requests traced in a second, whatever asks for it; of one tenant a quarter",
        gt=0,
        le=100_000,
    )
    trace_steps_per_second: float = _setting(
        "telemetry",
        "N",
        5.0,
        "most engine steps traced in a second, of those that served traced requests",
        ge=0,
        le=1000,
    )
