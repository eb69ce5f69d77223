"""A proxy that hands on every byte, and delays answers."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

READ_BYTES = 65_536


@contextmanager
def slow_proxy(host: str, port: int, seconds: float) -> Iterator[int]:
    """A port that answers like `host`:`port`, `seconds` later."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(lambda near, back: _join(near, back, host, port, seconds), "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _join(near: asyncio.StreamReader, back: asyncio.StreamWriter, host: str, port: int, seconds: float) -> None:
    far, out = await asyncio.open_connection(host, port)
    with suppress(ConnectionError):
        await asyncio.gather(_pass_on(near, out, 0.0), _pass_on(far, back, seconds))


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    """Pass on the parts in order, each `seconds` after it came."""
    loop = asyncio.get_running_loop()
    while part := await source.read(READ_BYTES):
        if seconds:
            loop.call_later(seconds, sink.write, part)
        else:
            sink.write(part)
    loop.call_later(seconds, sink.close)
