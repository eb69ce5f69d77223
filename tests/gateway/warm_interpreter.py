"""Starts `sluice` and programs like it in a fraction of the time: by forking what has imported what they need.

`python -m tests.gateway.warm_interpreter` imports the server's modules, which takes three seconds, then forks a process
for each command that it is sent. That is as one just started: nothing has run in it, and it has no thread but its own.
Tests ask for one by `start`. Its environment is that in which the tests began: libraries that a test imports set
variables of their own later, and what needs a variable starts cold.
"""

import atexit
import gc
import os
import runpy
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from json import dumps, loads
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any, BinaryIO, Protocol

import httpx

from backend import compiled_core
from backend.bound_process import bound
from backend.worker.peaks import PRODUCT_SIZE

ROOT = Path(__file__).parents[2]
MODULES = (
    "gateway.cli.main",
    "gateway.app",
    "gateway.cli.keys",
    "gateway.cli.route",
    "fleet.process",
    "fleet.membership",
    "encodings.idna",
    "multiprocessing.synchronize",  # imported as a server starts
)
MESSAGE_BYTES = 1 << 16
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "PYTEST_"))}
_making = Lock()


class ServerHandle(Protocol):
    """What tests use of a `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def make_trusting_once() -> Callable[..., ssl.SSLContext]:
    """Return `httpx.create_ssl_context` that reads the authorities which a system trusts once: it takes 35 ms, at each
    `httpx.get`, and twice as a server starts.
    """
    create = httpx.create_ssl_context
    trusting = create()

    def shared(verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        plain = verify is True and cert is None
        return trusting if plain else create(verify=verify, cert=cert, trust_env=trust_env)

    return shared


def start(
    program: str, arguments: Sequence[str], stdout: BinaryIO, stderr: BinaryIO, *, warm: bool = True
) -> ServerHandle:
    """Runs `python -m program` with these arguments in the repository, without variables of Sluice's own."""
    if warm:
        return _warm_interpreter().start([program, *arguments], stdout, stderr)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.Popen(**bound(command), cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)


class ForkedProcess:
    """A process that the warm interpreter has forked and waits for."""

    def __init__(self, pid: int, exited: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exited = exited  # where the warm interpreter writes how it ended

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("sluice", timeout or 0)
        return status

    def send_signal(self, sig: int) -> None:
        """Sends it unless the process has ended, of which we may not have been told yet."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._exited], [], [], timeout)[0]:
            self.returncode = int(os.read(self._exited, MESSAGE_BYTES))
            os.close(self._exited)
        return self.returncode


class WarmInterpreter:
    """Runs until this process or its parent ends."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.gateway.warm_interpreter", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, pass_fds=[theirs.fileno()])
        atexit.register(self._stop)

    def start(self, command: Sequence[str], stdout: BinaryIO, stderr: BinaryIO) -> ForkedProcess:
        exited, told = os.pipe()
        with self._lock:  # or threads take each other's answers
            socket.send_fds(self._socket, [dumps(command).encode()], [stdout.fileno(), stderr.fileno(), told])
            pid = int(self._socket.recv(MESSAGE_BYTES))
        os.close(told)
        return ForkedProcess(pid, exited)

    def _stop(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _only() -> WarmInterpreter:
    return WarmInterpreter()


def _warm_interpreter() -> WarmInterpreter:
    with _making:  # threads start servers too
        return _only()


# The other end -------------------------------------------------------------------------------------------------------


def _wake(_signal: int, _frame: FrameType | None) -> None:
    """The number of the signal is written to the pipe that is waited for, by `signal.set_wakeup_fd`."""


def _serve_forks(commands: socket.socket) -> list[str] | None:
    """Forks for each command until the pipe closes. Returns a command, in its process."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, _wake)
    signal.set_wakeup_fd(wakes)
    running: dict[int, int] = {}  # where to tell how it ended, by process id
    while True:
        for ready in select.select([woken, commands], [], [])[0]:
            if ready == woken:
                os.read(woken, MESSAGE_BYTES)
                _tell_of_the_dead(running)
                continue
            message, files, _, _ = socket.recv_fds(commands, MESSAGE_BYTES, 3)
            if not message:
                for pid in running:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # a test may have stopped it
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                commands.close()
                os.dup2(files[0], 1)
                os.dup2(files[1], 2)
                for file in (woken, wakes, *files, *running.values()):
                    os.close(file)
                command: list[str] = loads(message)
                return command
            running[pid] = files[2]
            os.close(files[0])
            os.close(files[1])
            commands.send(str(pid).encode())


def _tell_of_the_dead(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        file = running.pop(pid)
        os.write(file, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(file)


def _run(program: str) -> None:
    """Run a module to its end, and end without taking the interpreter apart: that takes a second of a fork, whose every
    object is still shared with the process that was forked.
    """
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        status: object = 0
    except SystemExit as stop:
        status = stop.code or 0
    if not isinstance(status, int):
        raise SystemExit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main() -> None:
    compiled_core.use()
    for name in MODULES:
        import_module(name)
    httpx._transports.default.create_ssl_context = make_trusting_once()
    PRODUCT_SIZE["cpu"] = 256  # or a server multiplies for 0.1 s as it starts, to know the machine
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as commands:
        command = _serve_forks(commands)
    if command is not None:
        sys.argv = command
        _run(command[0])


if __name__ == "__main__":
    _main()
