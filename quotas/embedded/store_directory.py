"""The folder of the embedded store: its data, its socket, its log, and its two locks.

owner           locked by the gateway that runs the server
lock            locked by the server itself, and holds its process id: no other may open the same data
socket          where it listens
log, log.1      its log
appendonlydir/  its data (appendonly.aof before Redis 7)
"""

import os
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from io import FileIO
from pathlib import Path
from urllib.parse import quote

from quotas.embedded.errors import DirectoryUnusable
from quotas.policy.units import show_size

MAX_SOCKET_PATH = 107  # bytes; sockaddr_un(7)
MAX_LOG_BYTES = 1024 * 1024  # of each of the two files
TAIL_BYTES = 4096
LEAST_FREE_BYTES = 8 * 2**20  # of its disk, to start the server: it refuses every write on a full one
OTHER_REMEDIES = "or choose another folder with --state-dir, or set SLUICE_REDIS_URL to a server of your own"


class StoreDirectory:
    """The folder; made and checked on opening. Raises `DirectoryUnusable`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self.unusable(error) from None
        self._check_privacy()
        self._check_space()

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def socket(self) -> str:
        """The path that this process connects to; a path too long for a socket address goes through our descriptor of
        the folder.
        """
        path = str(self.path / "socket")
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        return f"/proc/self/fd/{self._descriptor}/socket"

    @property
    def url(self) -> str:
        return f"unix://{quote(self.socket)}"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def parts(self) -> Path:
        """The folder in which servers since Redis 7 keep the data."""
        return self.path / "appendonlydir"

    @property
    def aof(self) -> Path:
        """The file that the server's own tool takes to mend the data."""
        manifest = self.parts / "appendonly.aof.manifest"
        return manifest if manifest.exists() else self.path / "appendonly.aof"

    def try_lock(self, name: str) -> FileIO | None:
        """Lock the file of this name and return it; open, it holds the lock. None if another process holds it."""
        try:
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file = FileIO(descriptor, "r+")
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except OSError:
                file.close()
                raise
        except BlockingIOError:
            return None
        except OSError as error:
            raise self.unusable(error) from None
        return file

    def locker(self) -> str:
        """The server that holds `lock`, in words for an error."""
        with suppress(OSError):
            if number := (self.path / "lock").read_text().strip():
                return f"process {number}"
        return "another process"

    def begin_log(self, line: str) -> None:
        """Write the first line of a log; this also checks that the folder is writable."""
        try:
            with self.log.open("a") as log:
                log.write(f"{line}\n")
        except OSError as error:
            raise self.unusable(error) from None
        self.log.chmod(0o600)

    def bound_log(self) -> None:
        """Rename the log once it is too large. The server opens its log anew for every line, so it needs no signal."""
        with suppress(OSError):
            if self.log.stat().st_size > MAX_LOG_BYTES:
                self.log.replace(self.log.with_name("log.1"))

    def log_tail(self, since: int = 0) -> list[str]:
        """Return the last lines of the log after the byte `since`."""
        with suppress(OSError), self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(since, end - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
        return []

    def log_size(self) -> int:
        with suppress(OSError):
            return self.log.stat().st_size
        return 0

    def unusable(self, error: OSError) -> DirectoryUnusable:
        where = error.filename if isinstance(error.filename, str) else self.path
        reason = "is no directory" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        return DirectoryUnusable(f"{where}: {reason}; make {self.path} writable, {OTHER_REMEDIES}")

    def _check_space(self) -> None:
        disk = os.fstatvfs(self._descriptor)
        if (free := disk.f_bavail * disk.f_frsize) < LEAST_FREE_BYTES:
            self.close()
            raise DirectoryUnusable(
                f"too little space is left on the disk of {self.path}, where quotas are kept: {show_size(free)}, and "
                f"{show_size(LEAST_FREE_BYTES)} are needed; free some, "
                f"{OTHER_REMEDIES}"
            )

    def _check_privacy(self) -> None:
        status = os.fstat(self._descriptor)
        problem = None
        if status.st_uid != os.geteuid():
            problem = f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}: run it as that user"
        elif status.st_mode & 0o077:
            problem = f"may be entered by other users: chmod 700 {self.path}"
        if problem:
            self.close()
            raise DirectoryUnusable(f"{self.path} {problem}, {OTHER_REMEDIES}")
