"""A Postgres server of the tests' own, from the system's packages (Debian's `postgresql`)."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.gateway.server_process import eventually

SETTINGS = ("fsync=off", "listen_addresses=", "max_connections=40", "shared_buffers=16MB")


def _binary(name: str) -> str:
    found = sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))[-1:] or [shutil.which(name)]
    if found[0] is None:
        pytest.skip("no Postgres here: apt-get install postgresql")
    return found[0]


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server while the block runs, and yield the URL of its database. Without Postgres or psycopg tests skip."""
    psycopg = pytest.importorskip("psycopg", reason="no psycopg here: the extra postgres")
    initdb, postgres = _binary("initdb"), _binary("postgres")
    user = "postgres" if os.getuid() == 0 else None  # it refuses to run as root
    with TemporaryDirectory(prefix="sluice-pg-") as name:  # its socket's path may have 107 characters
        directory = Path(name)
        if user is not None:
            shutil.chown(directory, user)
        data, log = directory / "data", directory / "log"
        words = [initdb, "-D", str(data), "-A", "trust", "-U", "sluice", "-N"]
        subprocess.run(words, user=user, check=True, capture_output=True, cwd=directory)
        settings = [word for one in (*SETTINGS, f"unix_socket_directories={directory}") for word in ("-c", one)]
        with log.open("wb") as out:
            server = subprocess.Popen(
                [postgres, "-D", str(data), *settings], user=user, stdout=out, stderr=out, cwd=directory
            )
        url = f"postgresql://sluice@/postgres?host={directory}"

        def answers() -> bool:
            assert server.poll() is None, log.read_text()
            try:
                psycopg.connect(url).close()
            except psycopg.OperationalError:
                return False
            return True

        try:
            eventually(answers)
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # at once: SIGTERM waits for clients
            server.wait()
