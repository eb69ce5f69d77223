"""The processes of a benchmark: each on its own core, answering one JSON line for each line it reads."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from backend.bound_process import bound
from backend.timed_run import end_group
from labs.benchmarks.machine import on_core

ROOT = Path(__file__).parents[2]
END_SECONDS = 180.0  # that a program in the background has to end: it may drain
CLEAN_UP_SECONDS = 20  # that a process may take to clean up after itself


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
            self._process.communicate(timeout=CLEAN_UP_SECONDS)
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
