"""Another project's server as a process of a benchmark, with what its whole tree of processes costs."""

import os
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from backend.bound_process import bound
from backend.timed_run import end_group
from labs.benchmarks import machine
from labs.benchmarks.processes import CLEAN_UP_SECONDS, WorkerFailed

START_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A server that answers."""

    port: int
    pid: int
    start_seconds: float


@contextmanager
def peer_server(
    command: Sequence[str], cores: Collection[int], env: Mapping[str, str], directory: Path, health: str
) -> Iterator[PeerServer]:
    """Run a command in a folder, on some cores, once it answers on `health`: its port and a path. Raises
    `WorkerFailed`.
    """
    log, began = directory / "log", time.monotonic()
    with machine.on_cores(cores), log.open("wb") as said:
        process = subprocess.Popen(
            **bound(command),
            cwd=directory,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    port, _, path = health.partition("/")
    try:
        while not _is_ready(int(port), path):
            if process.poll() is not None or time.monotonic() > began + START_SECONDS:
                raise WorkerFailed(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield PeerServer(int(port), process.pid, time.monotonic() - began)
    finally:
        end_group(process, CLEAN_UP_SECONDS)


def _is_ready(port: int, path: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", f"/{path}")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def tree_cpu_seconds(pid: int) -> float:
    return sum(machine.cpu_seconds(one) for one in tree(pid))


def tree_memory_bytes(pid: int) -> int:
    """The memory of its processes, what they share divided among them."""
    lines = (line for one in tree(pid) for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines())
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
