"""Every setting of the gateway, in records by subject: type, unit, default and meaning.

The setting `max_num_seqs` is the variable `SLUICE_MAX_NUM_SEQS` and the flag `--max-num-seqs`. A flag wins over a
variable, a variable over the default. The engine's own configuration checks the settings that depend on the model.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, SecretStr

from gateway.http import cors
from gateway.settings import otel_variables
from gateway.settings.engine_fields import ExecutionFields, MemoryFields, ModelFields, SchedulingFields
from gateway.settings.field import (
    IntOrAuto,
    NameList,
    PathOrAuto,
    PortOrOff,
    SecretOrAuto,
    SettingRecord,
    UrlOrAuto,
    setting,
)
from gateway.settings.machine import most_connections


def _standard(name: str, default: str | None = None) -> Callable[[], str | None]:
    """A default that reads OpenTelemetry's standard variable."""
    return lambda: os.environ.get(name) or default


def _otlp_protocol(value: object) -> object:
    return "http" if value == "http/protobuf" else value


def default_state_dir() -> Path:
    """Returns `$XDG_STATE_HOME/sluice`, or `~/.local/state/sluice` (XDG base directory specification), unexpanded for a
    user without a home.
    """
    home = os.environ.get("XDG_STATE_HOME")
    path = (Path(home) if home else Path("~/.local/state")) / "sluice"
    with suppress(RuntimeError):
        path = path.expanduser()
    return path


class QuotaFields(SettingRecord):
    """These settings say where the policy is, and what replicas share."""

    policy: PathOrAuto = setting(
        "quotas",
        "PATH",
        None,
        "policy file, or folder of them: classes, tenants and their limits; edits take effect while serving; auto: "
        "the built-in policy, without limits",
    )
    redis_url: UrlOrAuto = setting(
        "quotas",
        "URL",
        None,
        "Redis or Valkey that replicas keep quotas in: redis://, rediss:// or unix://; auto: a private server in DIR",
    )
    redis_timeout: float = setting(
        "quotas", "SECONDS", 0.25, "longest wait for the quota store before its outage begins", gt=0, le=10
    )
    quota_lease: float = setting(
        "quotas",
        "SECONDS",
        30.0,
        "time after which a crashed replica's reservations are freed, and for which an outage of the store is bridged",
        ge=3,
        le=3600,
    )

    shared_debts: Literal["on", "off"] = setting(
        "quotas",
        "on|off",
        "on",
        "on: replicas with one model and one store exchange the tenants' service ten times a second, so that shares "
        "hold over all of them; off: on each replica by itself",
    )

    advertise: str | None = setting(
        "quotas",
        "URL",
        None,
        "this replica's address for routers: announced in the store, with its admin port at the same host, for a "
        "router's `--replicas-store`; the port defaults to --port",
        pattern=r"^https?://[^/?#@\s]+$",
        form="http:// or https:// with a host, and nothing behind its port",
    )


class NetworkFields(SettingRecord):
    """These settings bound what the tenants' port takes."""

    host: str = setting("network", "HOST", "127.0.0.1", "address to listen on", min_length=1)
    port: int = setting("network", "PORT", 8000, "port to listen on; 0: any free one", ge=0, le=65_535)
    http_workers: IntOrAuto = setting(
        "network",
        "N",
        None,
        "processes that speak HTTP in place of the engine's; connections are divided among them, and a limit per "
        "address holds in each. 0: none; auto: one for every 4 cores, at most 8",
        ge=0,
        le=64,
    )
    max_connections: int = setting(
        "network",
        "N",
        most_connections,
        "most connections at once; a further one evicts another, preferably one that has shown no key",
        ge=1,
    )
    max_connections_per_peer: IntOrAuto = setting(
        "network",
        "N",
        None,
        "most connections of one address; auto: half of --max-connections, and all of it for this machine's own",
        ge=1,
    )
    cors_origins: str = setting(
        "network",
        "ORIGINS",
        "off",
        "origins of web pages whose scripts may call the API, such as https://a.example, separated by commas; *: of "
        "all; off: of none",
        pattern=f"^(?:{cors.ORIGINS})$",
        form="off, * or origins such as https://a.example, separated by commas",
    )
    public_models: Literal["on", "off"] = setting(
        "network",
        "on|off",
        "off",
        "answer /v1/models, /server_info, /model_info and /v1/loads without a key, as routers probe them: the "
        "model's name, its limits, and the load of all tenants together",
    )
    unknown_fields: Literal["ignore", "refuse"] = setting(
        "network",
        "ignore|refuse",
        "ignore",
        "treatment of unknown request fields without effect on the answer: ignored, and listed in the header "
        "x-sluice-ignored, or refused with a 400; unknown fields with an effect are always refused",
    )
    max_body_bytes: ByteSize = setting(
        "network", "BYTES", ByteSize(4 * 2**20), "largest request body; a larger one is answered 413", ge=1024
    )
    max_unparsed_bytes: ByteSize = setting(
        "network",
        "BYTES",
        ByteSize(64 * 2**20),
        "most unparsed bytes of one tenant's request bodies, and half as many of one key; a body of more than 64KiB "
        "waits until it fits",
        ge=2048,
    )
    refused_per_second: float = setting(
        "network",
        "N",
        20.0,
        "most refused requests of an API key in a second; further ones are answered 429 unread. For an address "
        "without a valid key, further answers wait. Each 64KiB read of a body counts one more",
        ge=1,
        le=1_000_000,
    )
    header_timeout: float = setting(
        "network", "SECONDS", 10.0, "time for a client to send its request's headers", gt=0, le=3600
    )
    idle_timeout: float = setting(
        "network", "SECONDS", 75.0, "time a connection may stay open between two requests", gt=0, le=86_400
    )
    body_timeout: float = setting(
        "network", "SECONDS", 30.0, "time without progress after which a request's body is given up", gt=0, le=3600
    )
    write_timeout: float = setting(
        "network",
        "SECONDS",
        30.0,
        "time without progress after which a client that does not read is cut",
        gt=0,
        le=3600,
    )
    drain_delay: float = setting(
        "network",
        "SECONDS",
        0.0,
        "time to keep serving while not ready, after a signal to stop, so that balancers notice",
        ge=0,
        le=3600,
    )
    drain_timeout: float = setting(
        "network",
        "SECONDS",
        30.0,
        "time for requests in flight to end by themselves, after that delay, before they are ended with an error",
        ge=0,
        le=86_400,
    )
    tls_cert_file: Path | None = setting("network", "FILE", None, "certificate chain (PEM); turns TLS on")
    tls_key_file: Path | None = setting("network", "FILE", None, "private key of the certificate (PEM)")


class SecurityFields(SettingRecord):
    """These settings say where keys and secrets are, and who may reach the operators' port."""

    state_dir: Path = setting(
        "security",
        "DIR",
        default_state_dir,
        "where the pepper, hashes of API keys, the admin key, the audit log, step times and the private store are kept",
    )
    demo_key: SecretOrAuto = setting(
        "security",
        "KEY",
        None,
        "API key of the tenant demo; auto: made at first start, on a loopback address only",
    )
    pepper: SecretOrAuto = setting(
        "security", "", None, "secret that API keys are hashed with, where replicas share it; auto: DIR/pepper"
    )
    storage_secret: SecretOrAuto = setting(
        "security",
        "",
        None,
        "secret that stored responses are encrypted under, where replicas share it; auto: follows from the pepper",
    )
    old_storage_secrets: SecretOrAuto = setting(
        "security", "", None, "earlier secrets, separated by commas, that still decrypt stored responses"
    )
    webhook_secret: SecretOrAuto = setting(
        "security",
        "",
        None,
        "secret that alerts of budgets are signed with, whsec_ and base64, where replicas share it; auto: "
        "DIR/webhook-secret",
    )

    admin_host: str = setting("admin", "HOST", "127.0.0.1", "address of the admin API and its page", min_length=1)
    admin_port: PortOrOff = setting(
        "admin", "PORT", 8001, "port of the admin API and its page; 0: any free one; off: none"
    )
    policy_edits: Literal["auto", "on", "off"] = setting(
        "admin",
        "HOW",
        "auto",
        "whether admins may edit the policy's files from the page; auto: unless they are in a Git checkout",
    )
    machine_price: str | None = setting(
        "admin",
        "PRICE",
        None,
        "price of an hour of this machine, such as 3.50/h or '3.50 USD/h', by which the admin port tells the cost of a "
        "million tokens and each tenant's part of the machine's bill; replicas on one store have one price",
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?( [A-Z]{3})?/h$",
        form="an amount and an hour, such as 3.50/h or 3.50 USD/h",
    )
    admin_key: SecretOrAuto = setting("admin", "", None, "key of the admin API; auto: DIR/admin-key, made when needed")
    admin_url: str | None = setting(
        "admin",
        "URL",
        None,
        "address of the admin page in browsers, to which OpenID Connect brings them back; ends with /",
        pattern=r"^https?://[^/?#@\s]+/([^?#\s]+/)?$",
        form="an address that ends with /, such as https://ops.example.com/sluice/",
    )
    oidc_issuer: str | None = setting(
        "admin",
        "URL",
        None,
        "OpenID Connect provider at which admins sign in on the page, by the extra oidc; https, or this machine",
        pattern=r"^(https://|http://(127\.0\.0\.1|localhost|\[::1\])[:/])[^?#\s]+$",
        form="an issuer such as https://login.example.com/realms/ops",
    )
    oidc_client_id: str | None = setting("admin", "ID", None, "this gateway's id at the provider", min_length=1)
    oidc_client_secret: SecretOrAuto = setting("admin", "", None, "its secret there; auto: none, PKCE alone")
    oidc_scope: str = setting("admin", "WORDS", "openid profile email", "scopes that the provider is asked for")
    oidc_claim: str = setting(
        "admin", "NAME", "groups", "claim that brings roles, by its name or a path such as realm_access.roles"
    )
    oidc_role: NameList = setting(
        "admin",
        "ROLE=VALUE",
        (),
        "role that a value of the claim brings, such as admin=platform or viewer=* for anybody; may be repeated",
    )


class LoggingFields(SettingRecord):
    """These settings choose the logs for people and for a replay."""

    event_log: Path | None = setting(
        "logging", "FILE", None, "record the scheduler's events and decisions here, for `sluice explain` and `replay`"
    )
    event_log_bytes: ByteSize = setting(
        "logging",
        "BYTES",
        ByteSize(64 * 2**20),
        "size at which the event log is rotated; 8 old segments are kept",
        ge=65_536,
    )
    request_log_url: UrlOrAuto = setting(
        "logging",
        "URL",
        None,
        "Postgres database that gateways keep the log of requests in, postgresql://USER:PASSWORD@HOST/DB, by the extra "
        "postgres; auto: DIR/requests.sqlite",
    )
    request_log_bytes: ByteSize = setting(
        "logging",
        "BYTES",
        ByteSize(256 * 2**20),
        "size of the searchable log of ended requests, whose oldest go first; it holds prompts and answers where the "
        "policy has log_texts; 0: none is kept",
        ge=0,
    )
    request_log_retention: float = setting(
        "logging",
        "SECONDS",
        30 * 86_400.0,
        "time that ended requests stay in that log",
        ge=60,
        le=10 * 366 * 86_400,
    )
    log_level: Literal["auto", "debug", "info", "warning", "error"] = setting(
        "logging", "LEVEL", "auto", "least severe level that is logged; auto: info, with --dev debug"
    )
    log_format: Literal["auto", "json", "text"] = setting(
        "logging",
        "FORMAT",
        "auto",
        "format of the messages on stderr; auto: text on a terminal and with --dev, else json",
    )
    dev: bool = setting(
        "logging", "BOOL", False, "for development: readable logs, down to debug messages and errors' texts"
    )


class TelemetryFields(SettingRecord):
    """These settings say where metrics and traces are sent."""

    metrics_on_tenant_port: bool = setting(
        "telemetry", "true|false", False, "serve /metrics to tenants as well; it names all of them"
    )
    backlog_target: float = setting(
        "telemetry",
        "SECONDS",
        10.0,
        "target of predicted work for one replica: sluice_replicas_wanted is its work divided by this",
        gt=0,
        le=86_400,
    )
    metrics_interval: float = setting(
        "telemetry",
        "SECONDS",
        partial(otel_variables.milliseconds, "OTEL_METRIC_EXPORT_INTERVAL", 15.0),
        "between two pushes of the metrics to the collector",
        ge=1,
        le=3600,
    )
    otlp_endpoint: str | None = setting(
        "telemetry",
        "URL",
        _standard("OTEL_EXPORTER_OTLP_ENDPOINT"),
        "OpenTelemetry collector that spans and metrics are sent to, such as http://localhost:4317 for grpc and "
        "http://localhost:4318 for http; nothing is sent without one",
    )
    otlp_protocol: Annotated[Literal["grpc", "http"], BeforeValidator(_otlp_protocol)] = setting(
        "telemetry",
        "HOW",
        _standard("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        "protocol of the collector: OTLP over gRPC, or protobuf over HTTP",
    )
    otlp_logs: Literal["on", "off"] = setting(
        "telemetry", "on|off", "off", "send the log lines of ended requests to the collector too, as log records"
    )
    otlp_headers: SecretStr | None = setting(
        "telemetry", "", None, "headers for the collector, such as authorization=Bearer%20...: NAME=VALUE,NAME=VALUE"
    )
    trace_sample_ratio: float = setting(
        "telemetry",
        "SHARE",
        partial(otel_variables.sample_ratio, 0.01),
        "share of requests without a client's trace that are traced",
        ge=0,
        le=1,
    )
    trace_slow_seconds: float = setting(
        "telemetry",
        "SECONDS",
        2.0,
        "wait for a first token, for memory or for the client to read that has a request traced anyway",
        gt=0,
        le=86_400,
    )
    trace_max_per_second: float = setting(
        "telemetry",
        "N",
        40.0,
        "most requests traced in a second; a quarter of it for one tenant",
        gt=0,
        le=100_000,
    )
    trace_steps_per_second: float = setting(
        "telemetry",
        "N",
        5.0,
        "most engine steps with traced requests that are traced in a second",
        ge=0,
        le=1000,
    )


class SettingFields(
    TelemetryFields,
    LoggingFields,
    SecurityFields,
    NetworkFields,
    QuotaFields,
    MemoryFields,
    ExecutionFields,
    SchedulingFields,
    ModelFields,
):
    """All settings of the gateway, in the order of the help: pydantic takes the fields of the last base first."""
