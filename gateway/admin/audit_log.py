"""The audit log: one JSON object a line, appended and never rewritten.

{"at": Unix seconds, "actor": who, "action": what, "target": to what, "result": how it ended}

A line is on the disk before the change takes effect. Nothing here deletes or rewrites a line; replicas that share the
file append to it side by side.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from gateway.errors import AuditUnavailable
from gateway.key_mask import masked

FILE = "audit.log"  # in the state directory
TAIL_BYTES = 256 * 1024  # read back from the file's end
MAX_ENTRIES = 1000


class AuditLog:
    """Appends to the audit log and reads its end; `clock` gives Unix seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = asyncio.Lock()  # entries of this process are written in the order of their times

    async def record(self, actor: str, action: str, target: str, result: str) -> None:
        """Write one entry and wait for the disk. Raises `AuditUnavailable` when it cannot be written."""
        async with self._lock:
            try:
                await asyncio.to_thread(append_entry, self._path, self._clock(), actor, action, target, result)
            except OSError as error:
                raise AuditUnavailable(
                    f"Nothing was changed: {self._path} cannot be written ({error.strerror})."
                ) from error

    async def entries(self) -> list[dict[str, Any]]:
        """Return the latest entries, the newest first, including those of earlier runs."""
        return await asyncio.to_thread(_tail, self._path)


def append_entry(path: Path, at: float, actor: str, action: str, target: str, result: str) -> None:
    """Write one entry, without keys, and wait for the disk. Raises `OSError`."""
    entry = {"at": at, "actor": actor, "action": action, "target": target, "result": result}
    _append(path, masked(orjson.dumps(entry).decode()).encode() + b"\n")


def _append(path: Path, line: bytes) -> None:
    """Append in one write, so that lines of several processes do not mix; a line that was cut short is closed first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if not _ends_a_line(descriptor):
            line = b"\n" + line
        written = os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if written < len(line):
        raise OSError(None, "only a part of the line was written")


def _ends_a_line(descriptor: int) -> bool:
    """Return whether the file ends with a line feed or is empty."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _tail(path: Path) -> list[dict[str, Any]]:
    """Read the entries at the end of the file, the newest first, leaving out lines that are cut short or damaged."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    entries = [entry for line in reversed(lines) if (entry := _parsed(line)) is not None]
    return entries[:MAX_ENTRIES]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None
