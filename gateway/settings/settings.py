"""Checks the settings: each one by itself, and the contradictions between them."""

import os
import re
import resource
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from operator import itemgetter
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import ByteSize, SecretStr, field_validator, model_validator

from backend.config import Batching, KVAllocation
from gateway.settings.machine import MAX_DEFAULT_CONNECTIONS, MIN_DEFAULT_CONNECTIONS, SPARE_FILES, most_http_workers
from gateway.settings.secret_rules import MIN_ADMIN_KEY_CHARS, is_token, placeholder, rule, weakness, webhook_secret
from gateway.settings.setting_fields import SettingFields
from quotas.policy.schema import MODEL

MIN_DEMO_KEY_CHARS = 8
OPEN_FILES = MAX_DEFAULT_CONNECTIONS + SPARE_FILES  # needed by the highest default
FEW_FILES = (
    f"this process may not open more files; for {MAX_DEFAULT_CONNECTIONS} connections raise its limit to {OPEN_FILES} "
    "(`ulimit -Hn`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
)
POSTGRES = ("postgresql://", "postgres://")
ADMIN_ROLES = ("viewer", "operator", "admin")
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+=[\x21-\x2b\x2d-\x7e]*", re.ASCII)


class Settings(SettingFields):
    """The checked settings, frozen and read once at start. Raises `ValidationError` if they cannot be served."""

    @property
    def models(self) -> dict[str, str]:
        """The directories, files or names of the models, by their names in the API; a directory or a file goes by its
        own name, not by its path. The first serves requests without a model.
        """
        named = {(name or _own_name(path)): path for name, path in map(_named, self.model)}
        if self.served_model_name:
            (_, path), *others = named.items()
            named = {self.served_model_name: path, **dict(others)}
        return named

    @property
    def named_adapters(self) -> dict[str, tuple[str, Path]]:
        """The adapters to load at start, by name: the name of the model of each, and its directory."""
        found, models = dict[str, tuple[str, Path]](), self.models
        for name, _, rest in (given.partition("=") for given in self.adapter):
            model, _, path = rest.partition("=")
            found[name] = (model, Path(path)) if path and model in models else (self.served_name, Path(rest))
        return found

    @property
    def serves_adapters(self) -> bool:
        return bool(self.adapter) or self.adapter_dir is not None

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the gateway."""
        return _is_loopback(self.host)

    @property
    def num_http_workers(self) -> int:
        """The number of HTTP workers; 0 if the engine's process speaks HTTP itself."""
        return most_http_workers() if self.http_workers is None else self.http_workers

    @property
    def open_files(self) -> int:
        """The files that the process may need to open."""
        return self.max_connections + SPARE_FILES

    @property
    def has_few_files(self) -> bool:
        """True if the limit of open files lowers the default of `max_connections`."""
        return "max_connections" not in self.model_fields_set and self.max_connections < MAX_DEFAULT_CONNECTIONS

    @property
    def served_name(self) -> str:
        """The name of the first model in the API."""
        return next(iter(self.models))

    @field_validator("state_dir", "model")
    @classmethod
    def _home_is_known(cls, given: Path | tuple[str, ...]) -> Path | tuple[str, ...]:
        try:
            if isinstance(given, Path):
                return given.expanduser()
            for one in given:
                Path(_named(one)[1]).expanduser()
        except RuntimeError:
            raise ValueError("begins with a home directory that is not known: name the whole path") from None
        return given

    @field_validator("demo_key")
    @classmethod
    def _demo_key_is_a_bearer_token(cls, key: SecretStr | None) -> SecretStr | None:
        return _refuse(_token(key, MIN_DEMO_KEY_CHARS), placeholder)

    @field_validator("admin_key")
    @classmethod
    def _admin_key_is_strong(cls, key: SecretStr | None) -> SecretStr | None:
        return _refuse(_token(key, MIN_ADMIN_KEY_CHARS), weakness)

    @field_validator("redis_url")
    @classmethod
    def _redis_url_is_one(cls, url: SecretStr | None) -> SecretStr | None:
        if url and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        if url and not _has_good_port(url.get_secret_value()):
            raise ValueError(
                "must be redis://[[USER]:PASSWORD@]HOST[:PORT][/DB] with a port up to 65535; in a password / # ? @ are "
                "percent-encoded (%2F %23 %3F %40)"
            )
        return url

    @field_validator("request_log_url")
    @classmethod
    def _request_log_url_is_one(cls, url: SecretStr | None) -> SecretStr | None:
        text = "" if url is None else url.get_secret_value()
        if text and find_spec("psycopg") is None:
            raise ValueError("needs psycopg: pip install 'sluice-gateway[postgres]'")
        if text and not (text.startswith(POSTGRES) and _has_good_port(text) and _is_read_by_libpq(text)):
            raise ValueError(
                "must be postgresql://[USER[:PASSWORD]@]HOST[:PORT]/DB with a port up to 65535; in a password / # ? @ "
                "% and a space are percent-encoded (%2F %23 %3F %40 %25 %20)"
            )
        return url

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint_is_a_url(cls, url: str | None) -> str | None:
        if url and not (url.startswith(("http://", "https://")) and "@" not in url):
            raise ValueError("must begin with http:// or https:// and hold no password: SLUICE_OTLP_HEADERS may")
        if url and not _has_good_port(url):
            raise ValueError("must be http://HOST[:PORT][/PATH] with a port up to 65535")
        return url

    @field_validator("otlp_headers")
    @classmethod
    def _otlp_headers_are_pairs(cls, headers: SecretStr | None) -> SecretStr | None:
        if headers and not all(map(_HEADER.fullmatch, headers.get_secret_value().split(","))):
            raise ValueError("must be NAME=VALUE, separated by commas, each VALUE URL-encoded")
        return headers

    @field_validator("pepper", "storage_secret")
    @classmethod
    def _secret_is_strong(cls, pepper: SecretStr | None) -> SecretStr | None:
        if pepper and len(pepper.get_secret_value().encode()) < 32:
            raise ValueError("must be at least 32 bytes, such as `openssl rand -hex 32` prints")
        return _refuse(pepper, weakness)

    @field_validator("webhook_secret")
    @classmethod
    def _webhook_secret_is_one(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            webhook_secret(secret.get_secret_value())
        return _refuse(secret, weakness)

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
        f"--kv-memory-bytes {format_bytes(settings.kv_memory_bytes)} and --kv-memory-fraction "
        f"{settings.kv_memory_fraction:g} both set the size of the KV cache: give one"
    )


def _bodies_fit(settings: Settings) -> str | None:
    unparsed, body = settings.max_unparsed_bytes, settings.max_body_bytes
    if unparsed >= 2 * body:
        return None
    return (
        f"--max-unparsed-bytes {format_bytes(unparsed)} leaves an API key half of it, which holds no body of "
        f"--max-body-bytes {format_bytes(body)}: raise the first to {format_bytes(2 * body)} or lower the second"
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


def _named(given: str) -> tuple[str, str]:
    """The name, which may be empty, and the model of a `--model`. A path may hold a = behind a slash."""
    name, is_named, path = given.partition("=")
    return (name, path) if is_named and "/" not in name else ("", given)


def encoder_name(model: str) -> str:
    """The name in the API of an embedding or a score model: a directory's own, as it is given."""
    return Path(model).name if Path(model).is_dir() else model


def _own_name(model: str) -> str:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model.removeprefix("hf:")


def _models_have_names(settings: Settings) -> str | None:
    names = [name for name, _ in map(_named, settings.model) if name]
    if not all(map(itemgetter(1), map(_named, settings.model))) or not all(re.fullmatch(MODEL, name) for name in names):
        return "--model (SLUICE_MODEL): must be a model, or a name of at most 256 characters and a model, as in a=dir/a"
    if len(settings.models) < len(settings.model):
        return "--model: two models have the same name in the API; give each another, as in a=dir/a"
    return None


def _models_have_one_rank(settings: Settings) -> str | None:
    if len(settings.model) == 1:
        return None
    unfit = {
        f"--tensor-parallel {settings.tensor_parallel}": settings.tensor_parallel > 1,
        f"--batching {settings.batching}": settings.batching is not Batching.CONTINUOUS,
        f"--kv-allocation {settings.kv_allocation}": settings.kv_allocation is not KVAllocation.PAGED,
        "--prefill-chunk off": settings.prefill_chunk == "off",
    }
    found = [flag for flag, is_unfit in unfit.items() if is_unfit]
    return f"{found[0]} is for one --model, and {len(settings.model)} are given: leave it out" if found else None


def _adapters_have_names(settings: Settings) -> str | None:
    names = [name for name, _, path in (given.partition("=") for given in settings.adapter) if path]
    if len(names) < len(settings.adapter) or not all(re.fullmatch(MODEL, name) and len(name) <= 256 for name in names):
        return "--adapter (SLUICE_ADAPTER): must be a name of at most 256 characters and a directory, as in sql=dir/sql"
    taken = [name for name in names if names.count(name) > 1 or name in settings.models]
    if taken:
        return f"--adapter {taken[0]}: the name is that of a model, or of another adapter"
    for name, rest in (given.split("=", 1) for given in settings.adapter):
        model, given, path = rest.partition("=")
        if given and model in settings.models and not path:
            return f"--adapter {name}={rest}: name the adapter's directory behind its model"
        if given and model not in settings.models and "/" not in model:
            known = ", ".join(map(repr, settings.models))
            return (
                f"--adapter {name}={rest}: {model!r} is no model of this server, which has {known}; a directory with "
                f"a = in its name is given as ./{rest}"
            )
    return None


def _adapters_have_one_rank(settings: Settings) -> str | None:
    if settings.tensor_parallel == 1 or not settings.serves_adapters:
        return None
    return f"--tensor-parallel {settings.tensor_parallel}: adapters are served by one rank; leave out the adapters"


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
    needed, room = settings.open_files, limit - SPARE_FILES
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    lower = f"lower it to {room}, or " if room >= MIN_DEFAULT_CONNECTIONS else ""
    return (
        f"--max-connections {settings.max_connections} needs {settings.max_connections} + {SPARE_FILES} = {needed} "
        f"open files, and this process may open {limit}: {lower}raise that limit to {max(needed, OPEN_FILES)} (`ulimit "
        "-Hn`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
    )


def _admin_key_is_chosen(settings: Settings) -> str | None:
    if settings.admin_port == "off" or settings.admin_key is not None or _is_loopback(settings.admin_host):
        return None
    return (
        f"--admin-host {settings.admin_host} lets other machines reach the admin API, for which no key is made: set "
        "SLUICE_ADMIN_KEY, or leave it on 127.0.0.1"
    )


def _sign_in_is_whole(settings: Settings) -> str | None:
    if settings.oidc_issuer is None:
        return None
    needed = {
        "--oidc-client-id": settings.oidc_client_id,
        "--oidc-role": settings.oidc_role,
        "--admin-url": settings.admin_url,
    }
    missing = [flag for flag, given in needed.items() if not given]
    if missing or settings.admin_port == "off":
        return f"--oidc-issuer needs {', '.join(missing) or 'the admin port: no --admin-port off'}"
    for given in settings.oidc_role:
        role, _, value = given.partition("=")
        if role not in ADMIN_ROLES or not value:
            return f"--oidc-role {given}: must be a role ({', '.join(ADMIN_ROLES)}) and a value, as in admin=platform"
    if "openid" not in settings.oidc_scope.split():
        return f"--oidc-scope {settings.oidc_scope!r} must have openid among its words"
    return None if find_spec("joserfc") else "--oidc-issuer needs joserfc: pip install 'sluice-gateway[oidc]'"


def _advertised_can_be_asked(settings: Settings) -> str | None:
    if settings.advertise is None or settings.admin_port != "off":
        return None
    return (
        f"--advertise {settings.advertise} needs the admin port, which routers ask for the state: no --admin-port off"
    )


_CHECKS: tuple[Callable[[Settings], str | None], ...] = (
    _advertised_can_be_asked,
    _one_kv_size,
    _bodies_fit,
    _budget_holds_decodes,
    _budget_holds_chunk,
    _budget_holds_whole_prompt,
    _default_answer_leaves_room,
    _models_have_names,
    _models_have_one_rank,
    _adapters_have_names,
    _adapters_have_one_rank,
    _tls_pair,
    _files_suffice,
    _admin_key_is_chosen,
    _sign_in_is_whole,
)


def _has_good_port(url: str) -> bool:
    """True if a URL can be parsed, which an unencoded password may prevent."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return not parts.fragment


def _is_read_by_libpq(url: str) -> bool:
    """True if Postgres's client parses a URL: its own error, at the first connection, quotes the password."""
    psycopg = import_module("psycopg")
    try:
        psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def format_bytes(count: int) -> str:
    """Returns a number of bytes as settings write it, 4194304 as 4MiB."""
    return ByteSize(count).human_readable().replace(".0", "")


def _token(key: SecretStr | None, least: int) -> SecretStr | None:
    if key and not is_token(key.get_secret_value(), least):
        raise ValueError(f"must be {rule(least)}")
    return key


def _refuse(secret: SecretStr | None, why: Callable[[str], str | None]) -> SecretStr | None:
    """Returns the secret. Raises `ValueError` with the reason that `why` finds against it."""
    if secret and (reason := why(secret.get_secret_value())):
        raise ValueError(reason)
    return secret


def _readable(path: Path) -> bool:
    return os.access(path, os.R_OK) and path.is_file()  # in this order: without access to the folder the second raises
