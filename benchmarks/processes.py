"""The processes of a benchmark: each on its own core, answering one JSON line for each line it reads."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from backend.timed_run import end_group
from benchmarks.machine import on_core

ROOT = Path(__file__).parent.parent
END_SECONDS = 180.0  # that a program in the background has to end: it may drain
PATIENCE = 20  # seconds that a process may take to clean up after itself
BASH = shutil.which("bash") or "bash"  # the command may be given another PATH
LEASH = """
alive=$1; shift
( (read -r _ <&"$alive"; kill -KILL 0) </dev/null >/dev/null 2>&1 & )
exec {alive}<&-
exec "$@"
"""
_alive, _end_of_life = os.pipe()  # reads nothing as long as this process, the only one that could write to it, lives


def _begin_a_life() -> None:
    global _alive, _end_of_life
    os.close(_alive)
    os.close(_end_of_life)
    _alive, _end_of_life = os.pipe()


os.register_at_fork(after_in_child=_begin_a_life)


def bound(command: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Return what `subprocess.Popen` and `subprocess.run` are given, so that a command does not outlive this process.

    It leads a process group of its own, in which a shell waits for this process to end, however it does, and then kills
    the group. PR_SET_PDEATHSIG would kill as soon as the thread ends that has started the command.
    """
    return {"args": [BASH, "-c", LEASH, "bash", str(_alive), *command], "process_group": 0, "pass_fds": (_alive,)}


class Worker:
    """A process that says when it is ready and then answers requests, one JSON line each way.

    Its standard error is the terminal's; the end of its input ends it. Raises `WorkerFailed` when it ends early.
    """

    def __init__(
        self, command: Sequence[str], core: int | None, env: Mapping[str, str] | None = None, directory: Path = ROOT
    ) -> None:
        self.command = list(command)
        with nullcontext() if core is None else on_core(core):
            self._process = subprocess.Popen(
                **bound(self.command),
                cwd=directory,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.ready: dict[str, Any] = {}

    @classmethod
    def module(cls, name: str, *arguments: str, core: int) -> "Worker":
        """`python -m name` in this interpreter, once it is ready."""
        return cls([sys.executable, "-m", name, *arguments], core)

    def __enter__(self) -> Self:
        self.ready = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=PATIENCE)
        end_group(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: object = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> "WorkerFailed":
        return WorkerFailed(f"{' '.join(self.command[-3:])} ended with status {self._process.wait()}")


class WorkerFailed(RuntimeError):
    """A process of the benchmark ended before it had answered."""


def free_port() -> int:
    """For a process that has to be told one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def background(command: Sequence[str], log: Path) -> Iterator[None]:
    """Run a command in the background, which is asked to end at the end; what it says goes to the log."""
    with log.open("wb") as said:
        process = subprocess.Popen(**bound(command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield
    finally:
        end_group(process, END_SECONDS)
