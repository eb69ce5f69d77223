"""A Valkey that a benchmark stops, kills and starts again on the same socket. It keeps nothing."""

import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from quotas.server_binary import find_server

START_SECONDS = 10


class OwnStore:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.sock"
        self.client = Redis(unix_socket_path=str(self.path))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self.kill()

    def start(self) -> None:
        command = [
            str(find_server().path),
            "--port",
            "0",
            "--unixsocket",
            str(self.path),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self.path.parent)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline:
                raise RuntimeError("the quota store did not start")
            time.sleep(0.01)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisError:
            return False
