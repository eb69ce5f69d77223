"""HTTP byte by byte: for what no well-behaved client would send."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from tests.gateway.server_process import PATIENCE, ServerProcess


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        (error,) = json.loads(self.body).values()
        assert {"message", "type", "param", "code"} <= error.keys()
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert isinstance(error["code"], str | None)
        return error  # type: ignore[no-any-return]


class RawClient:
    """A TCP connection. Reading blocks for `PATIENCE` seconds at most, then fails the test."""

    def __init__(self, server: ServerProcess, receive_buffer: int | None = None, port: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", port or server.port))

    @property
    def port(self) -> int:
        """Its own, by which the other end knows it."""
        return int(self._socket.getsockname()[1])

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self._socket.sendall(part)

    def receive(self, size: int = 65536) -> bytes:
        """What has come; empty when the server has closed."""
        return self._socket.recv(size)

    def reply(self, method: str = "POST") -> Reply:
        response = HTTPResponse(self._socket, method=method)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read())

    def is_closed(self) -> bool:
        """Whether the server closes after its last bytes."""
        try:
            while self.receive():
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()

    def shut(self) -> None:
        """Close the sending half: all is said, and the answer is waited for."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with an RST, as a killed container's kernel may."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@contextmanager
def connected(server: ServerProcess, receive_buffer: int | None = None, port: int | None = None) -> Iterator[RawClient]:
    client = RawClient(server, receive_buffer, port)
    try:
        yield client
    finally:
        client.close()


def exchange(server: ServerProcess, raw: bytes, method: str = "POST") -> Reply:
    with connected(server) as client:
        client.send(raw)
        return client.reply(method)


def request(server: ServerProcess, body: object, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """The bytes of a POST; `headers` replace the usual ones, an empty one is left out."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    usual = {"host": "sluice", "content-length": str(len(payload)), **server.headers}
    lines = [f"{name}: {value}" for name, value in {**usual, **given}.items() if value]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + payload


def chat(prompt: str = "Count from 3 to 12.", **fields: object) -> dict[str, object]:
    return {"model": "embedded", "messages": [{"role": "user", "content": prompt}], **fields}


def completion(**fields: object) -> dict[str, object]:
    return {"model": "embedded", "prompt": "1, 2, 3,", "max_tokens": 4, **fields}
