"""A connection to the embedded store's server that says whether it answers, and later that it has ended."""

import socket
from contextlib import suppress
from typing import Self

PING_SECONDS = 1.0
ANSWER_BYTES = 256


class ServerConnection:
    """Open until closed; readable when the server has closed it, which it does only by ending."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def open(cls, path: str) -> Self | None:
        """None where nothing listens, or what listens does not answer yet: it may be loading its data."""
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
