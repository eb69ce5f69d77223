"""A Redis server of a benchmark's own, which it may kill and start again. It keeps nothing."""

import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from backend.bound_process import bound
from labs.benchmarks.processes import WorkerFailed
from quotas.embedded.server_binary import find_server

START_SECONDS = 10


def server_command(directory: Path, port: int, program: Path | None = None) -> list[str]:
    """The command of a server on a TCP port of this machine, unless that is 0, which keeps nothing."""
    keep_nothing = ["--dir", str(directory), "--save", "", "--appendonly", "no"]
    return [str(program or find_server().path), "--bind", "127.0.0.1", "--port", str(port), *keep_nothing]


class RedisServer:
    """On a socket in `directory`, and on a TCP port of this machine unless that is 0.

    The program is the one that a gateway's embedded store would run, unless another is named. Raises `WorkerFailed`
    when it does not start.
    """

    def __init__(self, directory: Path, port: int = 0, program: Path | None = None) -> None:
        path = str(directory / "store.sock")
        self.url = f"unix://{path}"
        self.client = Redis(unix_socket_path=path)
        self._command = [*server_command(directory, port, program), "--unixsocket", path]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(**bound(self._command), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise WorkerFailed(f"{self._command[0]} did not start")
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisError:
            return False
