"""Files are sealed for their tenant and name, chunk by chunk, and are there as a whole or not at all."""

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.batches.file_bytes import CHUNK_BYTES, FileBytes, LostFile
from gateway.tenants.sealer import Sealer


@pytest.fixture
def files(tmp_path: Path) -> FileBytes:
    return FileBytes(tmp_path / "files", Sealer([b"secret"]))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
def test_a_file_reads_as_it_was_written(files: FileBytes, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    with files.create("acme/..", "file-1") as writer:
        for start in range(0, size, 10_000):
            writer.write(content[start : min(start + 10_000, size)])
        assert not files.has("acme/..", "file-1"), "not before it is whole"
    assert writer.size == size and files.read("acme/..", "file-1") == content[:size]
    path = files.path("acme/..", "file-1")
    assert path.parent.parent == files.folder and path.stat().st_mode & 0o777 == 0o600
    assert files.tenants() == ["acme/.."] and [name for name, _ in files.entries("acme/..")] == ["file-1"]


def test_a_file_of_another_tenant_or_name_or_with_chunks_out_of_order_does_not_open(files: FileBytes) -> None:
    files.write("a", "file-1", b"x" * (CHUNK_BYTES + 1))
    raw = files.path("a", "file-1").read_bytes()
    first = 4 + int.from_bytes(raw[:4])
    for tenant, name, found in (
        ("b", "file-1", raw),
        ("a", "file-2", raw),
        ("a", "file-1", raw[first:] + raw[:first]),
        ("a", "file-1", raw[:-1]),
    ):
        path = files.path(tenant, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found)
        with pytest.raises(OSError, match="does not open"):
            files.read(tenant, name)


def test_a_reader_that_is_left_before_the_end_holds_no_descriptor(files: FileBytes) -> None:
    files.write("a", "file-1", b"x" * (2 * CHUNK_BYTES))
    chunks = files.chunks("a", "file-1")
    assert next(chunks) == b"x" * CHUNK_BYTES
    held = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.exists()]
    assert not [path for path in held if path.endswith("file-1")]
    files.delete("a", "file-1")
    with pytest.raises(LostFile, match="file-1 is not there"):
        next(chunks)


def test_an_upload_that_fails_leaves_nothing(files: FileBytes) -> None:
    with suppress(RuntimeError), files.create("a", "file-1") as writer:
        writer.write(b"x" * (CHUNK_BYTES + 1))
        raise RuntimeError
    assert files.entries("a") == []


def test_a_full_disk_keeps_no_part_of_a_file(files: FileBytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for size in (5000, CHUNK_BYTES + 1):  # as it is closed, and as it is written
            with pytest.raises(OSError, match="too large"):
                files.write("a", f"file-{size}", os.urandom(size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert files.entries("a") == []
