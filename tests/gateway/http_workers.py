"""The HTTP workers of a real server, looked at from outside: which there are, and which of them serves a connection."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.gateway.raw_client import RawClient
from tests.gateway.server_process import ServerProcess, eventually

MODULE = b"gateway.workers.worker_process"
NUMBERS_OF_WORKERS = [pytest.param(0, id="one process", marks=pytest.mark.nightly), pytest.param(1, id="HTTP worker")]
"""What a whole gateway is tested with where a worker might make a difference; most are tested in one process."""


def children(server: ServerProcess) -> list[int]:
    """The process ids of all that the server has started, its own not among them."""
    return [pid for pid, parent, _ in _processes() if parent == server.process.pid]


def workers(server: ServerProcess) -> list[int]:
    """The process ids of its live HTTP workers."""
    return [pid for pid, parent, command in _processes() if parent == server.process.pid and MODULE in command]


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting for its end to be noticed."""
    return any(pid == other and command for other, _, command in _processes())


def worker_of(server: ServerProcess, client: RawClient) -> int:
    """The process id of the worker that has accepted a connection."""
    found: list[int] = []

    def accepted() -> bool:
        socket = f"socket:[{_inode(server.port, client.port)}]"
        found.extend(pid for pid in workers(server) if socket in _files(pid))
        return bool(found)

    eventually(accepted)
    return found[0]


@contextmanager
def clients_of_each(server: ServerProcess, count: int = 1) -> Iterator[dict[int, list[RawClient]]]:
    """A number of connections to each worker, between which the kernel decides; by process id."""
    clients: dict[int, list[RawClient]] = {pid: [] for pid in workers(server)}
    opened: list[RawClient] = []
    try:
        while any(len(few) < count for few in clients.values()):
            opened.append(RawClient(server))
            its = clients[worker_of(server, opened[-1])]
            if len(its) < count:
                its.append(opened[-1])
        yield clients
    finally:
        for client in opened:
            client.close()


def _processes() -> Iterator[tuple[int, int, bytes]]:
    """Each with its id, its parent's and its command line, which is empty once it has ended."""
    for folder in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if folder.name.isdigit():
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                yield int(folder.name), int(parent), (folder / "cmdline").read_bytes()


def _files(pid: int) -> set[str]:
    found = set[str]()
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.add(str(file.readlink()))
    return found


def _inode(local: int, remote: int) -> str:
    """The inode of a connection's socket on the server's side; 0 until it is accepted."""
    ends = f":{local:04X}", f":{remote:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, mine, other, *_, inode = line.split()[:10]
        if (mine[8:], other[8:]) == ends:
            return inode
    return "0"
