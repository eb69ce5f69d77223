"""One process of a Valkey or Redis server, our child, over the data of one folder."""

import os
import subprocess
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path
from shlex import quote

from quotas.embedded_errors import DataDamaged, DirectoryUnusable, EmbeddedStoreError, ServerUnavailable
from quotas.server_binary import ServerBinary
from quotas.store_directory import OTHER_REMEDIES, StoreDirectory

LAUNCHER = Path(__file__).with_name("server_launcher.py")
STOP_SECONDS = 10.0  # to write its data out
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # and none that may hold a secret
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
    """Runs from when it is made until `stop`, or until the thread that made it ends: see `server_launcher`.

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
        """Raises what ended it."""
        status = self._process.poll()
        if status is not None:
            raise self._failure(status)

    def warnings(self) -> list[str]:
        """What it said of its data since it started: an append-only file cut off in its last command, after a crash."""
        lines = self._directory.log_tail(self._log_start)
        return [line.partition(" # ")[2] for line in lines if " # " in line and "AOF" in line]

    def stop(self) -> None:
        """Returns when it has ended: told to, and killed where it does not."""
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
                f"(what follows the damage is lost), or restore a copy; {_told(said)}"
            )
        return ServerUnavailable(
            f"{self._binary.path} ended with status {status}; see {directory.log} for why, {OTHER_REMEDIES}; "
            f"{_told(said)}"
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


def _told(said: list[str]) -> str:
    return f"its last words: {said[-1]!r}" if said else "it said nothing"


def _is_full(path: Path) -> bool:
    with suppress(OSError):
        return os.statvfs(path).f_bavail == 0
    return False
