"""Changes by a command line, on record in the audit log of the gateway's state directory."""

import os
import pwd
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from gateway.admin.audit_log import FILE, append_entry
from gateway.tenants.key_store import KeyStore, KeyStoreError


@contextmanager
def on_record(store: KeyStore, action: str, target: str) -> Iterator[None]:
    """Record in the audit log the block's change before it, and its failure, if it fails."""
    actor = f"command line of {_user()}"
    note = partial(append_entry, store.directory / FILE, actor=actor, action=action, target=target)
    try:
        note(at=time.time(), result="begun")
    except OSError as error:
        raise KeyStoreError(
            f"nothing was changed: {store.directory / FILE} cannot be written ({error.strerror})"
        ) from None
    try:
        yield
    except KeyStoreError as error:
        with suppress(OSError):
            note(at=time.time(), result=f"failed: {error!s:.500}")
        raise


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"the user with id {os.geteuid()}"
