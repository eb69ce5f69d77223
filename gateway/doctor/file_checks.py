"""Checks of the files and limits that a gateway needs of its machine."""

import os
import resource
import shutil
import ssl
from datetime import UTC, datetime
from pathlib import Path

from gateway.doctor.check import Check, ok, problem, warning
from gateway.settings.settings import FEW_FILES, Settings, encoder_name
from gateway.tenants.key_store import KeyStore, KeyStoreError
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.unnamed_tenants import unnamed_tenant_lines
from quotas.policy.policy import ALL_MODELS, Policy
from quotas.policy.policy_file import PolicyError
from quotas.policy.problems import did_you_mean
from quotas.policy.units import counted

MIN_FREE_BYTES = 2**30  # for the store's log, the audit log and an event log
MAX_LISTED_MODELS = 20
EXPIRY_WARNING_DAYS = 30  # days before a certificate ends
SECRETS = ("pepper", "admin-key", "webhook-secret", "keys.json")


def open_files(settings: Settings, limits: tuple[int, int] | None = None) -> Check:
    """Check the limit of open files.

    Settings beyond the hard limit are refused, and a low limit lowers the default of connections.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.open_files
    found = f"{_limit(hard)} may be open, {needed:,} are needed for {settings.max_connections:,} connections"
    if settings.has_few_files:
        return warning("open files", found, FEW_FILES)
    return ok("open files", found if soft == hard else f"{found} ({_limit(soft)} until it raises its own limit)")


def _limit(count: int) -> str:
    return "any number" if count == resource.RLIM_INFINITY else f"{count:,}"


def state_dir(settings: Settings) -> Check:
    directory = settings.state_dir
    try:
        return _directory(directory) if directory.exists() else _new_directory(directory)
    except OSError as error:
        return problem("state", f"{error.filename}: {error.strerror}", "choose another --state-dir, or another user")


def _directory(directory: Path) -> Check:
    if not directory.is_dir():
        return problem("state", f"{directory} is no directory", "choose another --state-dir")
    mode = directory.stat().st_mode
    if mode & 0o022:
        return problem("state", f"{directory} may be written by other users", f"chmod 700 {directory}")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return problem(
            "state", f"{directory} cannot be written by {_user()}", "chown it, or choose another --state-dir"
        )
    for path in (directory / name for name in SECRETS):
        if path.exists() and path.stat().st_mode & 0o077:
            return problem("state", f"{path} may be read by other users", f"chmod 600 {path}")
    return _contents(directory)


def _new_directory(directory: Path) -> Check:
    above = next(parent for parent in directory.absolute().parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        return problem("state", f"{directory} cannot be made by {_user()}", "make it, or choose another --state-dir")
    return ok("state", f"{directory} is made at the first start")


def _contents(directory: Path) -> Check:
    try:
        keys = KeyStore(directory).records()
    except KeyStoreError as error:
        return problem("state", str(error))
    free = shutil.disk_usage(directory).free
    found = f"{directory}: {counted(len(keys), 'key')}, {free / 2**30:.1f} GiB of disk free"
    if free < MIN_FREE_BYTES:
        return warning("state", found, "free some: the quota store writes there, and so do logs")
    return ok("state", found)


def _user() -> str:
    return f"the user with id {os.geteuid()}"


def policy(settings: Settings) -> Check:
    try:
        current = LivePolicy(settings.policy).current
    except PolicyError as error:
        first, *rest = error.problems
        more = f" (and {len(rest)} more)" if rest else ""
        return problem("policy", f"{first}{more}", f"`sluice policy check {settings.policy}` names all")
    if settings.policy is None:
        return ok("policy", f"the built-in one, which limits no tenant; version {current.version}")
    holds = f"{counted(len(current.classes), 'class')}, {counted(len(current.tenants), 'tenant')}"
    found = f"{holds}, version {current.version}"
    if unserved := _unserved_models(current, settings):
        told = f"{found}; models that are not served: {'; '.join(unserved)}"
        return warning("policy", told, "correct the name: neither a price nor an alias holds for another one")
    return ok("policy", found)


def _unserved_models(policy: Policy, settings: Settings) -> list[str]:
    """The models of prices, aliases and permissions that these settings do not serve, some of them. Adapters may come
    later from a directory of them.
    """
    if settings.adapter_dir is not None:
        return []
    encoders = [encoder_name(name) for name in (settings.embedding_model, settings.score_model) if name]
    served = {*settings.models, *settings.named_adapters, *encoders}
    named, allowed = {one.model for models in policy.aliases.values() for one in models}, set[str]()
    for tenant in (policy.default, *policy.tenants.values()):
        if tenant.price is not None:
            named.update(name for name, _ in tenant.price.models)
        allowed.update(tenant.models, *(key.models for key in tenant.keys.values()))
    named |= allowed - policy.aliases.keys() - {ALL_MODELS}  # an alias has no price: its models have
    return [f"{name}{did_you_mean(name, served)}" for name in sorted(named - served)[:MAX_LISTED_MODELS]]


def keys(settings: Settings) -> Check:
    """Check that each stored key's tenant is in the policy, if it names any."""
    try:
        records = KeyStore(settings.state_dir).records()
        current = LivePolicy(settings.policy).current
    except (KeyStoreError, PolicyError, OSError):
        return ok("keys", "not compared with the policy, because of the problem of one of them")
    unnamed = unnamed_tenant_lines(current, records) if current.tenants else []
    if not unnamed:
        return ok("keys", f"{len(records)} stored")
    return warning(
        "keys",
        f"tenants of stored keys that the policy does not name: {'; '.join(unnamed)}",
        "name them in the policy, or revoke the keys",
    )


def tls(settings: Settings) -> Check:
    """Check the certificate by a handshake with ourselves, in memory."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return _without_tls(settings)
    try:
        expires = _handshake(settings.tls_cert_file, settings.tls_key_file)
    except (ssl.SSLError, OSError) as error:
        return problem("tls", f"{settings.tls_cert_file}: {error}", "make it anew; certificate and key must match")
    days = (expires - datetime.now(UTC)).days
    found = f"{settings.tls_cert_file} ends on {expires:%Y-%m-%d}, in {counted(days, 'day')}"
    return (
        ok("tls", found)
        if days >= EXPIRY_WARNING_DAYS
        else warning("tls", found, "renew it, then restart: it is read at start")
    )


def _without_tls(settings: Settings) -> Check:
    if settings.is_loopback:
        return ok("tls", f"none; only this machine reaches {settings.host}")
    return warning(
        "tls",
        f"none, and {settings.host} is reached from other machines",
        "give --tls-cert-file and --tls-key-file, unless a proxy before the gateway ends TLS",
    )


def _handshake(cert: Path, key: Path) -> datetime:
    """The end of the certificate's validity. Raises `ssl.SSLError` if it has expired or does not fit the key."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(cert, key)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_side=False)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    done = False
    while not done:
        done = _advance(ours) & _advance(theirs)
    (ends,) = [value for name, value in (ours.getpeercert() or {}).items() if name == "notAfter"]
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(ends)), UTC)


def _advance(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
