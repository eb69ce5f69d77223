"""A quota store that a test stops, starts and kills."""

import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from backend.bound_process import bound
from tests.gateway.server_process import eventually
from tests.quotas.servers import BINARIES


@dataclass
class StoppableStore:
    """A server on one socket; it keeps nothing."""

    path: Path
    process: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def client(self) -> "Redis[bytes]":
        return Redis(unix_socket_path=str(self.path))

    def start(self) -> None:
        command = [BINARIES["valkey"], "--port", "0", "--unixsocket", str(self.path), "--save", ""]
        self.process = subprocess.Popen(**bound(command), stdout=subprocess.DEVNULL, cwd=self.path.parent)
        eventually(self._answers)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def has_slice(self, tenant: str) -> bool:
        """Whether a replica has set something aside of its limits."""
        with self.client as client:
            return any(name.startswith(b"s:") for name in client.hkeys(f"sluice:{{{tenant}}}"))

    def _answers(self) -> bool:
        try:
            with self.client as client:
                return bool(client.ping())
        except RedisError:
            return False
