"""Who changed what, line by line, for good.

    {"at": Unix seconds, "actor": who, "action": what, "target": to what, "result": how it ended}

A line is on the disk before the change takes effect. Nothing here deletes or rewrites one; replicas that share the file
append to it side by side.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from gateway.errors import AuditUnavailable

TAIL_BYTES = 256 * 1024  # of the file's end, that is read back
MAX_ENTRIES = 1000


class AuditLog:
    """`clock` gives Unix seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = asyncio.Lock()  # entries of this process are written in the order of their times

    async def record(self, actor: str, action: str, target: str, result: str) -> None:
        """Raises `AuditUnavailable` when it is not on the disk."""
        async with self._lock:
            entry = {"at": self._clock(), "actor": actor, "action": action, "target": target, "result": result}
            try:
                await asyncio.to_thread(_append, self._path, orjson.dumps(entry) + b"\n")
            except OSError as error:
                raise AuditUnavailable(
                    f"Nothing was changed: {self._path} cannot be written ({error.strerror})."
                ) from error

    async def entries(self) -> list[dict[str, Any]]:
        """The latest, newest first; those of earlier runs too."""
        return await asyncio.to_thread(_tail, self._path)


def _append(path: Path, line: bytes) -> None:
    """One write, so that lines of several processes do not mix; after a line that was cut short, on one of its own."""
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
    """Or is empty."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _tail(path: Path) -> list[dict[str, Any]]:
    """A line that is not whole, or damaged, is left out."""
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
