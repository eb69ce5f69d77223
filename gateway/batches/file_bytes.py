"""The bytes of tenants' files: in the state directory, sealed chunk by chunk, so that none is in memory as a whole.

    <state directory>/files/<tenant>/<file>                  chunks: the size of each in 4 bytes, and it, sealed
    <state directory>/files/<tenant>/<batch>/<line>.<epoch>  the result of one line, sealed alike

Replicas that share batches share this directory.
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import quote, unquote

from gateway.tenants.sealer import Sealer

CHUNK_BYTES = 2**18  # of a file, sealed at once
_SIZE_BYTES = 4


class LostFile(OSError):
    """A part of a file is missing, or is not this file's: it stays so."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Reads and writes the files of all tenants. Names are ids that the gateway has made."""

    folder: Path
    sealer: Sealer
    uploaded: Counter[str] = field(default_factory=Counter)  # by tenant, bytes of uploads that have not ended here

    def path(self, tenant: str, name: str) -> Path:
        return self.folder / f"t-{quote(tenant, safe='', errors='surrogatepass')}" / name

    def has(self, tenant: str, name: str) -> bool:
        return self.path(tenant, name).is_file()

    def create(self, tenant: str, name: str) -> "SealedWriter":
        return SealedWriter(self, tenant, name)

    def chunks(self, tenant: str, name: str) -> Iterator[bytes]:
        """Yield a file's content. Raises `LostFile`, and `OSError` for a disk that fails.

        The file is opened for each chunk: a reader that is left before the end, as of a batch that was cancelled,
        holds no descriptor until it is collected.
        """
        path, at, number = self.path(tenant, name), 0, 0
        while True:
            try:
                with path.open("rb") as file:
                    file.seek(at)
                    head = file.read(_SIZE_BYTES)
                    sealed = file.read(int.from_bytes(head))
            except FileNotFoundError:
                raise LostFile(f"{name} is not there") from None
            if not head:
                return
            chunk = self.sealer.open(tenant, f"{name}/{number}", sealed, CHUNK_BYTES)
            if chunk is None:
                raise LostFile(f"chunk {number} of {name} does not open: it is damaged, or its secret was removed")
            at, number = at + len(head) + len(sealed), number + 1
            yield chunk

    async def stream(self, tenant: str, name: str) -> AsyncIterator[bytes]:
        """Yield a file's content, read on threads."""
        chunks = self.chunks(tenant, name)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    def write(self, tenant: str, name: str, content: bytes) -> None:
        """Write a small file as a whole, to the disk."""
        with self.create(tenant, name) as writer:
            writer.write(content)

    def read(self, tenant: str, name: str) -> bytes:
        return b"".join(self.chunks(tenant, name))

    def delete(self, tenant: str, name: str) -> None:
        """Delete a file, or the folder of a batch's results."""
        path = self.path(tenant, name)
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def tenants(self) -> list[str]:
        """The tenants that have had files."""
        names = [one.name for one in self.folder.iterdir()] if self.folder.is_dir() else []
        return [unquote(name[2:], errors="surrogatepass") for name in names if name.startswith("t-")]

    def entries(self, tenant: str) -> list[tuple[str, float]]:
        """The files of the tenant's folder: the name of each, and when it was changed, in Unix seconds."""
        return [(one.name, one.stat().st_mtime) for one in self.path(tenant, "").iterdir()]


class SealedWriter:
    """Writes one file, 0600; it is there as a whole once the block is left without an error, and not before."""

    def __init__(self, files: FileBytes, tenant: str, name: str) -> None:
        self.size = 0  # bytes of content so far
        self._files, self._tenant, self._name = files, tenant, name
        self._path = files.path(tenant, name)
        self._draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._buffer = bytearray()
        self._number = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        return self

    def write(self, content: bytes) -> None:
        self.size += len(content)
        self._buffer += content
        while len(self._buffer) >= CHUNK_BYTES:
            self._seal(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    def _seal(self, chunk: bytes) -> None:
        assert self._file is not None
        sealed = self._files.sealer.seal(self._tenant, f"{self._name}/{self._number}", chunk)
        self._file.write(len(sealed).to_bytes(_SIZE_BYTES) + sealed)
        self._number += 1

    def close(self) -> None:
        """Have the file on the disk, which may take seconds, and there; leaving the block does it too."""
        assert self._file is not None
        if self._file.closed:
            return
        with self._file:
            if self._buffer:
                self._seal(bytes(self._buffer))
            self._file.flush()
            os.fsync(self._file.fileno())
        self._draft.replace(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self.close()
        finally:
            with suppress(OSError):  # of a full disk, which is told already
                self._file.close()
            self._draft.unlink(missing_ok=True)
