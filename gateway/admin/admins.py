"""The admins of a gateway, each with a key of its own and a role, and the file that keeps them.

    DIR/admins.json  by name: the role, SHA-256 of the key in hexadecimal, and when it was made

The owner's key (`SLUICE_ADMIN_KEY`, or DIR/admin-key) is an admin's beside them, and cannot be revoked here.
"""

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any

from gateway.errors import InvalidApiKey, RoleNotAllowed
from gateway.tenants.auth import bearer_token
from gateway.tenants.file_watch import Signature, signature
from gateway.tenants.key_store import ADMIN_BYTES, ADMIN_PREFIX, KeyStore, KeyStoreError

log = logging.getLogger(__name__)

FILE = "admins.json"  # in the state directory
MAX_NAME_CHARS = 64
FINGERPRINT_DIGITS = 8


class Role(StrEnum):
    """The role of an admin; each includes the rights of the roles before it."""

    VIEWER = "viewer"  # reads
    OPERATOR = "operator"  # acts on requests and on the process
    ADMIN = "admin"  # changes keys and the policy

    def includes(self, role: "Role") -> bool:
        return _ROLES.index(self) >= _ROLES.index(role)


_ROLES = (*Role,)


@dataclass(frozen=True, slots=True)
class Admin:
    """An admin of the admin port. The audit log has `name`; `digest` is SHA-256 of the key."""

    name: str
    role: Role
    digest: bytes = field(repr=False)
    created: str = ""  # ISO 8601

    def require(self, role: Role) -> None:
        """Raise `RoleNotAllowed` if the admin's role does not include this one."""
        if not self.role.includes(role):
            raise RoleNotAllowed(f"{self.name} has the role {self.role}; this needs {role}.")


class AdminStore:
    """Reads and changes the file of admins. Changes are made by one process at a time, and whole."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self.path = store.directory / FILE

    def read(self) -> dict[str, Admin]:
        """The admins by name. Raises `KeyStoreError` if the file is damaged, or may be read by other users."""
        if not self.path.exists():
            return {}
        if self.path.stat().st_mode & 0o077:
            raise KeyStoreError(f"{self.path} may be read by other users: chmod 600 {self.path}")
        try:
            return {name: _admin_of(name, entry) for name, entry in json.loads(self.path.read_bytes()).items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise KeyStoreError(
                f"{self.path} is damaged ({type(error).__name__}: {error}): restore it or delete it"
            ) from None

    def create(self, name: str, role: Role) -> str:
        """Add an admin; returns its key, which is kept nowhere. Raises `KeyStoreError` if the name is taken."""
        key = ADMIN_PREFIX + secrets.token_hex(ADMIN_BYTES)
        with self._edit() as admins:
            if name in admins:
                raise KeyStoreError(f"there is an admin {name} already: revoke it first")
            admins[name] = Admin(name, role, _digest(key), datetime.now(UTC).isoformat(timespec="seconds"))
        return key

    def revoke(self, name: str) -> None:
        """Forget an admin. Raises `KeyStoreError` if it is unknown."""
        with self._edit() as admins:
            if admins.pop(name, None) is None:
                raise KeyStoreError(f"there is no admin {name}: `sluice admins list` shows all")

    @contextmanager
    def _edit(self) -> Iterator[dict[str, Admin]]:
        with self._store.replacing(self.path) as write:
            admins = self.read()
            yield admins
            entries = {
                one.name: {"role": one.role, "sha256": one.digest.hex(), "created": one.created}
                for one in admins.values()
            }
            write(json.dumps(entries, indent=1).encode() + b"\n")


class AdminKeys:
    """Finds whose key opens the admin port. An edit of the file counts from the next request on."""

    def __init__(self, owner_key: str, store: AdminStore | None = None) -> None:
        digest = _digest(owner_key)
        self._owner = Admin(f"key {digest.hex()[:FINGERPRINT_DIGITS]}", Role.ADMIN, digest)
        self._store = store
        self._read: Signature | None = None
        self._by_digest: Mapping[bytes, Admin] = {digest: self._owner}
        self.signed_in: Callable[[bytes], Admin | None] = lambda _: None  # finds the admin of a sign-in's key

    def admin(self, authorization: bytes | None) -> Admin:
        """The admin whose key this is. Raises `InvalidApiKey` for any other key, and for all but the owner's while the
        file cannot be read.
        """
        self._refresh()
        key = bearer_token(authorization)
        found = self._by_digest.get(sha256(key).digest()) or self.signed_in(key)  # of digests, timing tells nothing
        if found is None:
            raise InvalidApiKey("Incorrect admin key provided: tenants' keys do not open the admin plane.")
        return found

    def _refresh(self) -> None:
        if self._store is None or (now := signature([self._store.path])) == self._read:
            return
        self._by_digest = {self._owner.digest: self._owner}  # no revoked admin stays while the file is damaged
        self._read = now
        try:
            self._by_digest = {one.digest: one for one in self._store.read().values()} | self._by_digest
        except KeyStoreError:
            log.exception("only the owner's key opens the admin port")
        except OSError:
            self._read = None  # the next request reads it again: the file need not change for this to be over
            log.exception("only the owner's key opens the admin port until the file of admins can be read")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _admin_of(name: str, entry: dict[str, Any]) -> Admin:
    return Admin(name, Role(entry["role"]), bytes.fromhex(entry["sha256"]), str(entry["created"]))
