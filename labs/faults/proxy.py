"""A TCP proxy whose connections can be made slow, held, cut and refused while it runs."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self

READ_BYTES = 4096
QUEUED_PARTS = 16  # read and not yet written, in each direction: beyond them the sender waits
BUFFER_BYTES = 16_384  # of the kernel, so that the far side soon feels it when nothing passes
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection ends with RST, and unsent bytes are lost


class Proxy:
    """A port of this machine that stands for another address, on a thread of its own.

    `latency` (seconds, each way) and `rate` (bytes a second, each way) may be set at any time.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Stand for `host`:`port`."""
        self.latency = 0.0
        self.rate = 0.0  # 0: any
        self._far = (host, port)
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()  # cleared: no byte and no end of a connection passes
        self._flows.set()
        self._joined: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self._run(self._listen(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def hold(self) -> None:
        """Let nothing pass either way, and no news of it: both sides have a half-open connection."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def delay(self, seconds: float = 0.05) -> None:
        """Let each byte pass `seconds` later, each way."""
        self.latency = seconds

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._reset)

    def refuse(self) -> None:
        """Reset every connection, and refuse new ones."""
        self._run(self._close())

    def clear(self) -> None:
        """Let everything pass again, at once."""
        self.latency = self.rate = 0.0
        self._loop.call_soon_threadsafe(self._flows.set)
        self._run(self._listen(self.port))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, port: int) -> int:
        if self._server is None:
            self._server = await asyncio.start_server(self._join, "127.0.0.1", port, backlog=1024, limit=READ_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._reset()

    async def _end(self) -> None:
        await self._close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reset(self) -> None:
        for pair in self._joined:
            for writer in pair:
                with suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()

    async def _join(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(asyncio.CancelledError):  # by `_end`; asyncio would log it
            try:
                await self._connected(near, back)
            finally:
                back.transport.abort()
        self._tasks.discard(task)

    async def _connected(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            await self._loop.sock_connect(sock, self._far)
        except OSError:
            sock.close()
            return
        far, out = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
        pair = (back, out)
        self._joined.add(pair)
        try:
            await asyncio.gather(self._pass_on(near, out), self._pass_on(far, back))
        finally:
            self._joined.discard(pair)
            out.close()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Pass on the parts in order, and then the end; a broken connection ends the other side too."""
        parts = asyncio.Queue[tuple[float, bytes]](QUEUED_PARTS)
        writing = asyncio.create_task(self._write(parts, sink))
        try:
            while not writing.done():
                try:
                    part = await source.read(READ_BYTES)
                except OSError:
                    part = b""
                put = asyncio.create_task(parts.put((self._loop.time() + self.latency, part)))
                await asyncio.wait((put, writing), return_when=asyncio.FIRST_COMPLETED)
                put.cancel()
                if not part:
                    break
            await writing
        finally:
            writing.cancel()

    async def _write(self, parts: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                due, part = await parts.get()
                await asyncio.sleep(due - self._loop.time())
                await self._flows.wait()
                if not part:
                    sink.close()
                    return
                sink.write(part)
                await sink.drain()
                if self.rate:
                    await asyncio.sleep(len(part) / self.rate)
