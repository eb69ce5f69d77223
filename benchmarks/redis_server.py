"""A Redis server of the benchmark's own, on a TCP port, that keeps nothing."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis
from redis.exceptions import ConnectionError as Disconnected

from benchmarks.machine import on_core
from benchmarks.processes import WorkerFailed
from quotas.server_binary import find_server

START_SECONDS = 10


@contextmanager
def redis_server(core: int) -> Iterator["Redis[bytes]"]:
    """A client of it; its port is `client.connection_pool.connection_kwargs["port"]`."""
    port = free_port()
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with on_core(core):
        process = subprocess.Popen([find_server().path, *flags], stdout=subprocess.DEVNULL)
    try:
        with Redis(port=port) as client:
            _wait_until_ready(client)
            yield client
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _wait_until_ready(client: "Redis[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.ping()
        except Disconnected:
            if time.monotonic() > deadline:
                raise WorkerFailed("redis did not start") from None
            time.sleep(0.01)
        else:
            return
