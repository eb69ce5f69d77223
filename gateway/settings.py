"""Every setting of the gateway: type, unit, default and meaning, and the contradictions that settings alone can show.

The setting `max_num_seqs` is the variable `SLUICE_MAX_NUM_SEQS` and the flag `--max-num-seqs`. A flag wins over a
variable, a variable over the default. What depends on the model is checked by the engine's own configuration.
"""

import os
import re
import resource
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.cores import spare_cores

ENV_PREFIX = "SLUICE_"
GROUPS = ("model", "engine", "memory", "quotas", "network", "security", "admin", "logging", "telemetry")
ADMIN_CONNECTIONS = 32
SPARE_FILES = 64 + ADMIN_CONNECTIONS  # descriptors kept for weights, logs and libraries beside the connections
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+=[\x21-\x2b\x2d-\x7e]*", re.ASCII)


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


IntOrAuto = Annotated[int | None, BeforeValidator(_auto)]  # None: auto
ChunkOrAuto = Annotated[Annotated[int, Field(ge=1)] | Literal["off"] | None, BeforeValidator(_auto)]
BytesOrAuto = Annotated[ByteSize | None, BeforeValidator(_auto)]
FractionOrAuto = Annotated[float | None, BeforeValidator(_auto)]
NameOrAuto = Annotated[str | None, BeforeValidator(_auto)]
PathOrAuto = Annotated[Path | None, BeforeValidator(_auto)]
UrlOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]
PortOrOff = Annotated[int, Field(ge=0, le=65_535)] | Literal["off"]
SecretOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]


class Settings(BaseSettings):
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
        "precision of weights and KV cache; auto: float32 on a CPU, where then no text depends on its batch; as stored "
        "on a GPU",
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
        "engine", "TOKENS", None, "max_tokens of a request that names none; auto: what its context leaves", ge=1
    )
    max_waiting: int = _setting(
        "engine", "N", 1024, "most requests that wait for the engine; one more is answered 503", ge=1
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
        "bound the queue alone, or nothing",
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
        "network", "N", 4096, "most connections at once; one more is answered 503 and closed", ge=1
    )
    max_body_bytes: ByteSize = _setting(
        "network", "BYTES", ByteSize(4 * 2**20), "largest request body; a larger one is answered 413", ge=1024
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
        "security", "DIR", default_state_dir, "where the pepper and the hashes of API keys are kept"
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
        "telemetry", "SECONDS", 15.0, "between two pushes of the metrics to the collector", ge=1, le=3600
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
        "telemetry", "SHARE", 0.01, "of requests without a trace of their own, that are traced", ge=0, le=1
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

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the gateway."""
        return _is_loopback(self.host)

    @field_validator("demo_key")
    @classmethod
    def _demo_key_is_a_bearer_token(cls, key: SecretStr | None) -> SecretStr | None:
        if key and not (8 <= len(key.get_secret_value()) <= 512 and _is_printable(key.get_secret_value())):
            raise ValueError("must be 8 to 512 printable ASCII characters without spaces")
        return key

    @field_validator("admin_key")
    @classmethod
    def _admin_key_is_long(cls, key: SecretStr | None) -> SecretStr | None:
        if key and not (16 <= len(key.get_secret_value()) <= 512 and _is_printable(key.get_secret_value())):
            raise ValueError("must be 16 to 512 printable ASCII characters without spaces")
        return key

    @field_validator("redis_url")
    @classmethod
    def _redis_url_is_one(cls, url: SecretStr | None) -> SecretStr | None:
        if url and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return url

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint_is_a_url(cls, url: str | None) -> str | None:
        if url and not (url.startswith(("http://", "https://")) and "@" not in url):
            raise ValueError("must begin with http:// or https:// and hold no password: SLUICE_OTLP_HEADERS may")
        return url

    @field_validator("otlp_headers")
    @classmethod
    def _otlp_headers_are_pairs(cls, headers: SecretStr | None) -> SecretStr | None:
        if headers and not all(map(_HEADER.fullmatch, headers.get_secret_value().split(","))):
            raise ValueError("must be NAME=VALUE, separated by commas, each VALUE URL-encoded")
        return headers

    @field_validator("pepper")
    @classmethod
    def _pepper_is_long(cls, pepper: SecretStr | None) -> SecretStr | None:
        if pepper and len(pepper.get_secret_value().encode()) < 32:
            raise ValueError("must be at least 32 bytes, such as `openssl rand -hex 32` prints")
        return pepper

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [problem for check in _CHECKS if (problem := check(self))]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _one_kv_size(settings: Settings) -> str | None:
    if settings.kv_memory_bytes is None or settings.kv_memory_fraction is None:
        return None
    return (
        f"--kv-memory-bytes {human_bytes(settings.kv_memory_bytes)} and --kv-memory-fraction "
        f"{settings.kv_memory_fraction:g} both set the size of the KV cache: give one"
    )


def _budget_holds_decodes(settings: Settings) -> str | None:
    budget, sequences = settings.max_num_batched_tokens, settings.max_num_seqs
    if budget is None or budget >= sequences:
        return None
    return (
        f"--max-num-batched-tokens {budget} is below --max-num-seqs {sequences}: a step computes one token for every "
        f"sequence that decodes, so raise the first to {sequences} or lower the second to {budget}"
    )


def _budget_holds_chunk(settings: Settings) -> str | None:
    budget, chunk = settings.max_num_batched_tokens, settings.prefill_chunk
    if budget is None or not isinstance(chunk, int) or chunk <= budget:
        return None
    return (
        f"--prefill-chunk {chunk} is above --max-num-batched-tokens {budget}, the most one step computes: lower the "
        f"first to {budget} or raise the second to {chunk}"
    )


def _budget_holds_whole_prompt(settings: Settings) -> str | None:
    budget, length = settings.max_num_batched_tokens, settings.max_model_len
    if budget is None or settings.prefill_chunk != "off" or length is None or length <= budget:
        return None
    return (
        f"--prefill-chunk off computes a prompt in one step, and --max-model-len {length} allows prompts longer than "
        f"--max-num-batched-tokens {budget}: raise that to {length} or lower the length"
    )


def _default_answer_leaves_room(settings: Settings) -> str | None:
    length, answer = settings.max_model_len, settings.default_max_tokens
    if length is None or answer is None or answer < length:
        return None
    return (
        f"--default-max-tokens {answer} leaves no room for a prompt in --max-model-len {length}: at most {length - 1}"
    )


def _tls_pair(settings: Settings) -> str | None:
    pair = {"--tls-cert-file": settings.tls_cert_file, "--tls-key-file": settings.tls_key_file}
    given = {flag: path for flag, path in pair.items() if path is not None}
    if len(given) == 1:
        (missing,) = pair.keys() - given.keys()
        return f"{next(iter(given))} without {missing}: TLS needs both"
    unreadable = [
        f"{flag} {path}: no such file, or not readable" for flag, path in given.items() if not _readable(path)
    ]
    return "\n".join(unreadable) or None


def _files_suffice(settings: Settings) -> str | None:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + SPARE_FILES
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    return (
        f"--max-connections {settings.max_connections} needs {settings.max_connections} + {SPARE_FILES} = {needed} "
        f"open files, and this process may open {limit}: lower it to {limit - SPARE_FILES} or raise `ulimit -n`"
    )


def _admin_key_is_chosen(settings: Settings) -> str | None:
    if settings.admin_port == "off" or settings.admin_key is not None or _is_loopback(settings.admin_host):
        return None
    return (
        f"--admin-host {settings.admin_host} lets other machines reach the admin API, for which no key is made: set "
        "SLUICE_ADMIN_KEY, or leave it on 127.0.0.1"
    )


_CHECKS: tuple[Callable[[Settings], str | None], ...] = (
    _one_kv_size,
    _budget_holds_decodes,
    _budget_holds_chunk,
    _budget_holds_whole_prompt,
    _default_answer_leaves_room,
    _tls_pair,
    _files_suffice,
    _admin_key_is_chosen,
)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def human_bytes(count: int) -> str:
    """4194304 is 4MiB."""
    return ByteSize(count).human_readable().replace(".0", "")


def _is_printable(text: str) -> bool:
    return all("!" <= character <= "~" for character in text)


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)
