"""The flags that `sluice route` and `sluice pick` have in common."""

import asyncio
import re
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from backend.extensions import extensions
from gateway.cli.arguments import argument
from gateway.cli.flags import SettingsError
from gateway.replica.fleet_secret import FleetSecret
from gateway.settings.settings import Settings
from gateway.tenants.auth import pepper_of
from gateway.tenants.key_store import KeyStore
from quotas.errors import StoreUnavailable

STORE_TIMEOUT_SECONDS = 1.0  # no request waits for this answer

SETTINGS = {
    "policy": "the replicas' policy file, or folder of them; edits take effect at once",
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "max_body_bytes": "largest request body; a larger one is answered 413",
    "max_unparsed_bytes": "most bytes of one tenant's bodies being read; half as many of one key",
    "refused_per_second": "most refused requests of a key or an address in a second; further answers wait",
    "body_timeout": "time without progress after which a request's body is given up",
    "drain_delay": "time to keep serving while not ready, after a signal to stop",
    "drain_timeout": "time for requests in flight to end by themselves, before they are ended with an error",
    "tls_cert_file": "certificate chain (PEM); turns TLS on",
    "tls_key_file": "private key of the certificate (PEM)",
    "redis_url": "quota store of the replicas, asked only for --replicas-store; auto: the private one in DIR",
    "state_dir": "directory of the replicas' pepper, hashes of API keys and admin key",
    "demo_key": "API key of the tenant demo",
    "admin_host": "address of the admin port",
    "admin_port": "port of the admin API, with /metrics and /admin/v1/fleet; 0: any free one; off: none",
    "admin_url": "address of the admin page in browsers, to which OpenID Connect brings them back; ends with /",
    "oidc_issuer": "OpenID Connect provider at which admins sign in on the page, by the extra oidc",
    "oidc_client_id": "this router's id at the provider; SLUICE_OIDC_CLIENT_SECRET is its secret there",
    "oidc_scope": "scopes that the provider is asked for",
    "oidc_claim": "claim that brings roles, by its name or a path such as realm_access.roles",
    "oidc_role": "role that a value of the claim brings, admin=platform or viewer=* for anybody; may be repeated",
    "log_level": "least severe level that is logged",
    "log_format": "format of the messages on stderr",
    "dev": "for development: readable logs, down to debug messages",
}
ROUTINGS = ("predicted", "round_robin", "least_load", "weighted", "cache_aware")
EPILOG = """\
SLUICE_PEPPER and SLUICE_ADMIN_KEY, which have no flags, are the replicas': the pepper of their API keys, and the key
of their admin ports, where their states are read. See docs/fleet.md."""


def _name_and_ports(text: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"((?:[\w-]{1,63}\.){0,126}[\w-]{1,63}\.?):([0-9]{1,5}):([0-9]{1,5})", text, re.ASCII)
    if match is None or not all(0 < int(port) < 65_536 for port in match.groups()[1:]):
        raise ValueError("is no NAME:PORT:ADMIN, such as replicas.internal:8000:8001")
    return match[1], int(match[2]), int(match[3])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 1:
        raise ValueError("is no interval: 0.01 to 1 seconds")
    return seconds


def add_fleet_flags(parser: ArgumentParser) -> None:
    """Add the flags of the replicas and of the choice among them."""
    fleet = parser.add_argument_group("fleet")
    which = fleet.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--replicas",
        metavar="FILE",
        type=Path,
        help="YAML file of the replicas' addresses; edits take effect at once",
    )
    which.add_argument(
        "--replicas-dns",
        metavar="NAME:PORT:ADMIN",
        type=argument(_name_and_ports),
        help="DNS name that resolves to the replicas' addresses, with their API and admin ports; resolved every second",
    )
    which.add_argument(
        "--replicas-store",
        metavar="MODEL",
        help="model name under which replicas announce themselves (--advertise) in the quota store: the one of "
        "--redis-url, else the private one in --state-dir",
    )
    fleet.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="predicted",
        help="routing policy (default: predicted); the others are baselines",
    )
    fleet.add_argument(
        "--state-interval",
        metavar="SECONDS",
        type=argument(_seconds),
        default=0.1,
        help="interval at which a replica's state is polled (default: 0.1)",
    )
    fleet.add_argument(
        "--replica-ca-file",
        metavar="FILE",
        type=Path,
        help="certificate (PEM) of the authority that signs the replicas' (default: the system's authorities)",
    )


def fleet_options(namespace: Namespace, settings: Settings, by_address: bool = False) -> Any:
    """Return the `FleetOptions`; with `by_address` replicas are named by IP address. Raises `SettingsError`."""
    from fleet.membership import DnsMembership, FileMembership, Membership  # noqa: PLC0415 - no other command needs it
    from fleet.process import FleetOptions  # noqa: PLC0415
    from fleet.replicas import ReplicasError  # noqa: PLC0415

    membership: Membership
    if namespace.replicas_store is not None:
        membership = _announced(namespace.replicas_store, settings, by_address)
    elif namespace.replicas_dns is not None:
        membership = DnsMembership(*namespace.replicas_dns)
    else:
        try:
            membership = FileMembership(namespace.replicas, by_address)
        except ReplicasError as error:
            raise SettingsError(f"--replicas {error}") from None
    return FleetOptions(membership, _routing(namespace.routing), namespace.state_interval, namespace.replica_ca_file)


def _routing(name: str) -> Any:
    """Return the way to pick, once the extensions have added theirs. Raises `SettingsError`."""
    from fleet.picker import PICKERS, Routing  # noqa: PLC0415

    for extension in extensions() if name not in PICKERS else ():
        import_module(extension.ROUTINGS)
    if name not in PICKERS:
        raise SettingsError(f"--routing {name}: must be one of {', '.join(PICKERS)}")
    return Routing(name)


def _announced(model: str, settings: Settings, by_address: bool) -> Any:
    """Return the membership of replicas that announce themselves in the store. Raises `KeyStoreError`."""
    from fleet.membership import StoreMembership  # noqa: PLC0415
    from quotas.store.announcements import Announcements  # noqa: PLC0415 - a router of a file or of DNS needs no store
    from quotas.store.redis_store import RedisStore  # noqa: PLC0415

    @asynccontextmanager
    async def opened() -> AsyncIterator[Announcements]:
        async with _store_url(settings) as url:
            store = RedisStore.at(url, STORE_TIMEOUT_SECONDS)
            try:
                with suppress(StoreUnavailable):  # the connection is made once it is up
                    await store.connect()
                yield store.announcements(model)
            finally:
                await store.close()

    secret = FleetSecret(pepper_of(settings, KeyStore(settings.state_dir)))
    return StoreMembership(opened, secret.opened, by_address)


@asynccontextmanager
async def _store_url(settings: Settings) -> AsyncIterator[str]:
    """Yield the URL of the configured store, else of the private one, which any process may keep."""
    from quotas.embedded.embedded_store import EmbeddedStore  # noqa: PLC0415

    if settings.redis_url is not None:
        yield settings.redis_url.get_secret_value()
        return
    store = EmbeddedStore(settings.state_dir)
    try:
        yield await asyncio.to_thread(store.start)
    finally:
        await asyncio.to_thread(store.stop)
