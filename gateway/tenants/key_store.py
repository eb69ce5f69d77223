"""Stores the gateway's API keys between starts: a pepper and the keys' hashes, in one directory.

    DIR/pepper     32 random bytes that every hash is keyed with, made at first start
    DIR/webhook-secret  the secret that alerts of budgets are signed with, made at first start
    DIR/admin-key  the key of the admin API, made at the first start that needs it
    DIR/keys.json  a line for each change of a key: id, tenant, hmac, created, expires, scopes, name, its settings, and
                   after a rotation the hmac and expiry of the secret that it replaced; or its id and that it is
                   revoked. The last line of an id holds

The directory is open to its owner alone. Secrets are replaced whole, and a line counts once it ends, so that a reader
never sees half of one.
"""

import base64
import errno
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from gateway.settings.secret_rules import MIN_ADMIN_KEY_CHARS, WEBHOOK_PREFIX, is_token, rule
from quotas.policy.policy import SCOPES
from quotas.policy.problems import quoted
from quotas.policy.words import stored_tenant_name

PEPPER_BYTES = 32
ADMIN_PREFIX = "sluice-admin-"
ADMIN_BYTES = 20
WEBHOOK_BYTES = 32


class KeyStoreError(Exception):
    """The directory cannot be used as it is; the message names the file and the remedy."""


class KeyStoreUnreadable(KeyStoreError):
    """The system refused to read or write a file, which may be over at the next attempt."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The secret of a key before its rotation, and the end of its validity."""

    digest: bytes = field(repr=False)
    expires: datetime


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One API key as it is stored. `digest` is HMAC-SHA-256 of the whole key under the pepper."""

    id: str
    tenant: str
    digest: bytes = field(repr=False)
    created: datetime  # moment of this secret
    expires: datetime | None = None  # None: never
    scopes: tuple[str, ...] = SCOPES
    name: str = ""
    replaced: Replaced | None = None
    settings: str = ""  # limits, models, classes and tags of its own, as JSON; empty: none

    @property
    def tags(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.settings).get("tags", {}) if self.settings else {}
        return found


class KeyStore:
    """The directory. The key file is read again only if it has changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._keys = _KeyFile(self.path)
        self._reading = threading.Lock()

    @property
    def path(self) -> Path:
        return self.directory / "keys.json"

    def pepper(self) -> bytes:
        """The pepper, made at the first call; processes that start together get the same one."""
        path = self.directory / "pepper"
        pepper = self._secret(path, secrets.token_bytes(PEPPER_BYTES))
        if len(pepper) != PEPPER_BYTES:
            raise KeyStoreError(
                f"{path} holds {len(pepper)} bytes, not {PEPPER_BYTES}: restore it, or delete it and make new keys"
            )
        return pepper

    @property
    def admin_key_path(self) -> Path:
        return self.directory / "admin-key"

    def admin_key(self) -> str:
        """The key of the admin API, made at the first call."""
        path = self.admin_key_path
        fresh = f"{ADMIN_PREFIX}{secrets.token_hex(ADMIN_BYTES)}\n"
        key = self._secret(path, fresh.encode()).decode("latin-1").strip()
        if not is_token(key, MIN_ADMIN_KEY_CHARS):
            raise KeyStoreError(
                f"{path} must hold {rule(MIN_ADMIN_KEY_CHARS)}: restore it, or delete it to have a new one made"
            )
        return key

    def webhook_secret(self) -> str:
        """The secret that alerts are signed with, as Standard Webhooks write it, made at the first call."""
        fresh = f"{WEBHOOK_PREFIX}{base64.b64encode(secrets.token_bytes(WEBHOOK_BYTES)).decode()}\n"
        return self._secret(self.directory / "webhook-secret", fresh.encode()).decode("latin-1").strip()

    def _secret(self, path: Path, fresh: bytes) -> bytes:
        """The contents of the file, which is created with `fresh` if it does not exist."""
        with _explained(path):
            if not path.exists():
                self._make_directory()
                _link_new(path, fresh)
            secret, mode = path.read_bytes(), path.stat().st_mode
        if mode & 0o077:
            raise KeyStoreError(f"{path} may be read by other users: chmod 600 {path}")
        return secret

    def records(self) -> list[KeyRecord]:
        return list(self.by_id().values())

    def by_id(self) -> Mapping[str, KeyRecord]:
        """The keys by id. An unchanged key is the same object as before, and so is the mapping if no key changed."""
        with self._reading, _explained(self.path):
            return self._keys.read()

    def add(self, record: KeyRecord) -> None:
        with self.edit() as records:
            if record.id in records:
                raise KeyStoreError(f"there is a key {record.id} already")
            records[record.id] = record

    def remove(self, key_id: str) -> bool:
        """Forget a key; returns False if it is unknown."""
        with self.edit() as records:
            return records.pop(key_id, None) is not None

    @contextmanager
    def edit(self) -> Iterator[dict[str, KeyRecord]]:
        """Yield the records by id to one writer at a time; the block's changes are stored, unless it raises."""
        with self._locked():
            before = self.by_id()
            records = dict(before)
            yield records
            changed = [record for key_id, record in records.items() if before.get(key_id) is not record]
            revoked = [{"id": key_id, "revoked": True} for key_id in before if key_id not in records]
            if changed or revoked:
                with self._reading:
                    self._keys.write(records, [*map(_entry, changed), *revoked])

    @contextmanager
    def replacing(self, path: Path) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that replaces the whole file, to one writer of the directory at a time."""
        with self._locked(), _explained(path):
            yield partial(_replace, path)

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise KeyStoreUnreadable(f"{self.directory} is no directory; choose one with --state-dir") from None
        if self.directory.stat().st_mode & 0o022:
            raise KeyStoreError(f"{self.directory} may be written by other users: chmod 700 {self.directory}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock: one writer at a time, over all processes."""
        with _explained(self.directory):
            self._make_directory()
            descriptor = os.open(self.directory, os.O_RDONLY)
            try:
                flock(descriptor, LOCK_EX)
                yield
            finally:
                os.close(descriptor)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeyStoreUnreadable(f"{path}: {error.strerror}; choose another directory with --state-dir") from None


FORMAT = b'{"version": 2}\n'
SPARE_LINES = 1000  # beyond two for each key, before the file is rewritten


class _KeyFile:
    """The part of the key file read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._records: Mapping[str, KeyRecord] = {}
        self._num_lines = self._size = self._checksum = 0  # of what was read, which ends with a line

    def read(self) -> Mapping[str, KeyRecord]:
        """Read the added lines, or all after any other change. Raises `OSError` and `KeyStoreError`."""
        if not self._path.exists():
            self._forget()
            return self._records
        content = memoryview(self._path.read_bytes())
        if self._size == 0 or len(content) < self._size or crc32(content[: self._size]) != self._checksum:
            self._forget()
            if content[: len(FORMAT)] != FORMAT:
                raise self._damaged(f"line 1: it is not {FORMAT.decode().strip()}")
        added = bytes(content[self._size :])
        self._take(added[: added.rfind(b"\n") + 1])  # an incomplete line is still being written, or was cut off
        return self._records

    def write(self, records: Mapping[str, KeyRecord], entries: list[dict[str, Any]]) -> None:
        """Add entries to the file just read, which then has these records. Raises `OSError`."""
        if self._size and self._num_lines < 2 * len(records) + SPARE_LINES:
            _append(self._path, self._size, _lines(entries))
        else:
            _replace(self._path, FORMAT + _lines(map(_entry, records.values())))

    def _take(self, added: bytes) -> None:
        lines, records = added.splitlines(), dict(self._records)
        for number, line in enumerate(lines, start=self._num_lines + 1):
            if number == 1:
                continue  # the format
            try:
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("revoked") is True:
                    records.pop(entry["id"], None)
                else:
                    record = _parse(entry)
                    records[record.id] = record
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise self._damaged(f"line {number}: {type(error).__name__}: {error}") from None
        if lines:
            self._records, self._num_lines = records, self._num_lines + len(lines)
            self._size, self._checksum = self._size + len(added), crc32(added, self._checksum)

    def _damaged(self, why: str) -> KeyStoreError:
        return KeyStoreError(f"{self._path} is damaged ({why}): restore it or delete it")


def _lines(entries: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def _append(path: Path, size: int, lines: bytes) -> None:
    """Write lines behind the first `size` bytes, over an incomplete line, and wait for the disk."""
    with path.open("r+b", buffering=0) as file:
        file.truncate(size)
        file.seek(size)
        try:
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def _link_new(path: Path, content: bytes) -> None:
    """Create `path` atomically, unless another process was first."""
    temporary = written_beside(path, content)
    with suppress(FileExistsError):
        path.hardlink_to(temporary)
    temporary.unlink()
    sync_names(path.parent)


def _replace(path: Path, content: bytes) -> None:
    written_beside(path, content).replace(path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Wait until links and renames in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def written_beside(path: Path, content: bytes) -> Path:
    """Write a file beside `path`, open to its owner alone, and return it once `content` is on the disk. What cannot be
    written leaves nothing. Raises `OSError`.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _entry(record: KeyRecord) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": record.id,
        "tenant": record.tenant,
        "hmac": record.digest.hex(),
        "created": record.created.isoformat(),
        "expires": record.expires.isoformat() if record.expires else None,
        "scopes": list(record.scopes),
        "name": record.name,
    }
    if record.settings:
        entry["settings"] = json.loads(record.settings)
    if old := record.replaced:
        entry["replaced"] = {"hmac": old.digest.hex(), "expires": old.expires.isoformat()}
    return entry


def _parse(entry: dict[str, Any]) -> KeyRecord:
    """Parse an entry. Raises `ValueError`, `KeyError` or `TypeError`."""
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r:.80} is no key")
    expires, old = entry.get("expires"), entry.get("replaced")
    return KeyRecord(
        id=_text(entry["id"]),
        tenant=_tenant(entry["tenant"]),
        digest=bytes.fromhex(entry["hmac"]),
        created=_moment(entry["created"]),
        expires=_moment(expires) if expires else None,
        scopes=tuple(one for one in SCOPES if one in _list(entry["scopes"])),
        name=_text(entry["name"]),
        replaced=Replaced(bytes.fromhex(old["hmac"]), _moment(old["expires"])) if old else None,
        settings=_settings(entry.get("settings", {})),
    )


def _settings(value: object) -> str:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} are no settings")
    return json.dumps(value) if value else ""


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r:.80} has no zone")
    return moment


def _tenant(value: object) -> str:
    """Parse the name of a tenant, by the policy's rules."""
    name = _text(value)
    try:
        return stored_tenant_name(name)
    except ValueError as error:
        raise ValueError(f"the tenant {quoted(name)} {error}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    value.encode()  # a lone surrogate is no text either
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is no list")
    return value
