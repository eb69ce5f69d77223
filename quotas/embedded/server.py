"""One process of a Valkey or Redis server, our child, over the data of one folder."""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from shlex import quote
from typing import Protocol, Self

from quotas.embedded.errors import DataDamaged, DirectoryUnusable, EmbeddedStoreError, ServerUnavailable
from quotas.embedded.server_binary import ServerBinary
from quotas.embedded.store_directory import OTHER_REMEDIES, StoreDirectory

LAUNCHER = Path(__file__).with_name("server_launcher.py")
STOP_SECONDS = 10.0  # to write its data out
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # no variable that may hold a secret
PARTED_SINCE = (7, 0)  # the data are several files and a manifest, which older servers do not see
SIGNS_OF_DAMAGE = ("reading the append only file", "AOF manifest", "check-aof")
CONFIG = {
    "port": "0",
    "unixsocket": "socket",
    "unixsocketperm": "700",
    "protected-mode": "yes",
    "logfile": "log",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "aof-use-rdb-preamble": "no",  # commands alone, which every version of Redis and of Valkey reads
    "auto-aof-rewrite-min-size": "16mb",
    "maxmemory-policy": "noeviction",
    "databases": "1",
    "maxclients": "1000",
}


class PrivateServer:
    """A server process that runs until `stop`, or until the thread that made it ends: see `server_launcher`.

    It is in a process group of its own, so that the Ctrl-C that stops a gateway does not reach the server before the
    gateway has settled; not in a session of its own, because Linux shares a core out among sessions (sched(7),
    autogroup), and beside a busy gateway the server then waited for seconds. It inherits `lock`, which the caller then
    closes.
    """

    def __init__(self, directory: StoreDirectory, binary: ServerBinary, lock: FileIO) -> None:
        _check_layout(directory, binary)
        directory.begin_log(f"starting {binary.path}, version {binary.version[0]}.{binary.version[1]}")
        self._directory = directory
        self._binary = binary
        self._log_start = directory.log_size()
        self._process = _launch(directory, binary, lock)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_running(self) -> None:
        """Raise `EmbeddedStoreError` with the reason if the server has ended."""
        status = self._process.poll()
        if status is not None:
            raise self._failure(status)

    def warnings(self) -> list[str]:
        """The server's log lines about its data since it started, such as an append-only file cut off by a crash in its
        last command.
        """
        lines = self._directory.log_tail(self._log_start)
        return [line.partition(" # ")[2] for line in lines if " # " in line and "AOF" in line]

    def stop(self) -> None:
        """Ask the server to end, kill it if it does not within `STOP_SECONDS`, and return when it has ended."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failure(self, status: int) -> EmbeddedStoreError:
        directory, said = self._directory, self._directory.log_tail(self._log_start)
        if _is_full(directory.path):
            return DirectoryUnusable(f"{directory.path}: no space is left; free some, {OTHER_REMEDIES}")
        if any(sign in line for line in said for sign in SIGNS_OF_DAMAGE):
            return DataDamaged(
                f"{self._binary.path} refuses the data in {directory.path}, which are as they were: copy the folder, "
                f"then mend them with {self._binary.check_aof} --fix {quote(str(directory.aof))} "
                f"(what follows the damage is lost), or restore a copy; {_last_words(said)}"
            )
        return ServerUnavailable(
            f"{self._binary.path} ended with status {status}; see {directory.log} for why, {OTHER_REMEDIES}; "
            f"{_last_words(said)}"
        )


def _check_layout(directory: StoreDirectory, binary: ServerBinary) -> None:
    if binary.version < PARTED_SINCE and directory.parts.exists():
        raise DataDamaged(
            f"{directory.parts} was written by a server of version 7.0 or later, and {binary.path} is "
            f"version {binary.version[0]}.{binary.version[1]}, which would begin without it: install a later one"
        )


def _launch(directory: StoreDirectory, binary: ServerBinary, lock: FileIO) -> "subprocess.Popen[bytes]":
    command = [str(binary.path.absolute())]
    for name, value in CONFIG.items():
        command += [f"--{name}", value]
    launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), str(lock.fileno())]
    try:
        with directory.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [*launcher, *command],
                cwd=directory.path,
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                process_group=0,
            )
    except OSError as error:
        raise directory.unusable(error) from None


def _last_words(said: list[str]) -> str:
    return f"its last words: {said[-1]!r}" if said else "it said nothing"


def _is_full(path: Path) -> bool:
    """True if no block or no inode is left; a file system without inodes of its own tells of none."""
    with suppress(OSError):
        disk = os.statvfs(path)
        return disk.f_bavail == 0 or (disk.f_files > 0 and disk.f_favail == 0)
    return False


PING_SECONDS = 1.0
ANSWER_BYTES = 256


class ServerConnection:
    """A connection to the server, open until closed. It is readable once the server has closed it, which a server does
    only by ending.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def open(cls, path: str) -> Self | None:
        """Connect and send a PING. Returns None without an answer: the server may be loading its data."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PING_SECONDS)
        with suppress(OSError):
            sock.connect(path)
            sock.sendall(b"PING\r\n")
            if sock.recv(ANSWER_BYTES) == b"+PONG\r\n":
                return cls(sock)
        sock.close()
        return None

    def fileno(self) -> int:
        return self._sock.fileno()

    def shut_down(self) -> None:
        """Ask the server to write its data out and end."""
        with suppress(OSError):
            self._sock.sendall(b"SHUTDOWN\r\n")

    def close(self) -> None:
        self._sock.close()


class Readable(Protocol):
    def fileno(self) -> int: ...


class StopSignal:
    """A flag set once, from any thread, for which a thread can wait beside a connection."""

    def __init__(self) -> None:
        self._is_set = False
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC)

    def __bool__(self) -> bool:
        return self._is_set

    def __del__(self) -> None:
        os.close(self._descriptor)

    def set(self) -> None:
        self._is_set = True
        os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float, connection: Readable | None = None) -> bool:
        """Wait until the flag is set or `connection` is readable, for `seconds` at most; returns True if either is
        so.
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if connection is not None:
            poll.register(connection, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


log = logging.getLogger(__name__)

RETRY_SECONDS = 0.01


class SharedServer:
    """The server shared by all gateways on one folder.

    It belongs to one thread, the parent of the server that it starts.
    """

    def __init__(self, directory: StoreDirectory, find: Callable[[], ServerBinary]) -> None:
        self._directory = directory
        self._find = find
        self._owner: FileIO | None = None  # the folder's owner lock, while it is ours
        self._own: PrivateServer | None = None
        self._told_leftover_to_end = False

    def connect(self, seconds: float, stopping: StopSignal) -> ServerConnection | None:
        """A connection to the server, which is started if no gateway runs one; None when told to stop.

        Raises `EmbeddedStoreError` when the server ends, or does not answer within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not stopping:
            if self._owner is None:
                self._owner = self._directory.try_lock("owner")
            if self._owner is not None:
                self._run()
            if self._own is not None or self._owner is None:
                connection = ServerConnection.open(self._directory.socket)
                if connection is not None:
                    return connection
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"{self._silence()} within {seconds:g} s")
            stopping.wait(RETRY_SECONDS)
        return None

    @property
    def is_ours(self) -> bool:
        return self._own is not None

    def warnings(self) -> list[str]:
        return self._own.warnings() if self._own else []

    def bound_log(self) -> None:
        if self._own:
            self._directory.bound_log()

    def release(self) -> None:
        """Stop the server if it is ours, and let another gateway own the folder."""
        if self._own:
            self._own.stop()
        if self._owner:
            self._owner.close()
        self._own = self._owner = None

    def _run(self) -> None:
        """Start our server unless it runs.

        An earlier owner's running server is ended first, because it has the same data open.
        """
        if self._own:
            self._own.check_running()
        elif lock := self._directory.try_lock("lock"):
            with lock:
                self._own = PrivateServer(self._directory, self._find(), lock)
        elif not self._told_leftover_to_end:
            self._end_leftover()

    def _end_leftover(self) -> None:
        connection = ServerConnection.open(self._directory.socket)
        if connection is not None:
            log.warning("%s in %s has no gateway: ending it", self._directory.locker(), self._directory.path)
            connection.shut_down()
            connection.close()
            self._told_leftover_to_end = True

    def _silence(self) -> str:
        directory = self._directory
        if self._own:
            return f"the store's server, process {self._own.pid}, did not answer: see {directory.log}; nothing came"
        if self._owner:
            return f"{directory.locker()} has the data in {directory.path}: end it, {OTHER_REMEDIES}; it did not end"
        return (
            f"another gateway has {directory.path}, but no server answers at {directory.socket} (gateways on several "
            f"machines cannot share a folder): end it, {OTHER_REMEDIES}; nothing came"
        )
