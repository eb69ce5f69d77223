import socket
from collections.abc import Iterator
from threading import Thread

import pytest


class Script:
    """A server that answers each request with the same parts, each its own packet."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while client.recv(65536):
                    for part in self.parts:
                        client.sendall(part)
            except OSError:
                return


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script()
    yield server
    server.close()
