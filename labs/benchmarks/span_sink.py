"""A collector that takes spans over HTTP and forgets them, as a process that a benchmark starts."""

import asyncio
import json
import sys
from contextlib import suppress

ACCEPTED = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
LENGTH = b"content-length:"


class Sink(asyncio.Protocol):
    """Answers each request when the last byte of its body is here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._head = b""
        self._left = 0  # bytes of the body

    def data_received(self, data: bytes) -> None:
        while data:
            if not self._left:
                self._head, end, data = (self._head + data).partition(b"\r\n\r\n")
                if not end:
                    return
                self._left, self._head = _length(self._head), b""
            taken = min(self._left, len(data))
            self._left, data = self._left - taken, data[taken:]
            if not self._left:
                self._transport.write(ACCEPTED)


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next(int(line.removeprefix(LENGTH)) for line in lines if line.startswith(LENGTH))


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Sink, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve())
