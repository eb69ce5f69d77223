"""`sluice serve` as a benchmark starts it: the embedded model, on a core of its own, with a key for each tenant."""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import on_core
from benchmarks.processes import ROOT
from gateway.auth import new_key, pepper_of
from gateway.key_store import KeyStore
from gateway.settings import Settings

READY = re.compile(r"ready at http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that answers."""

    port: int
    keys: Mapping[str, str]  # by tenant
    pid: int


@contextmanager
def served(core: int, tenants: Iterable[str], state_dir: Path, **settings: object) -> Iterator[Served]:
    """Run it on one core with one thread, its state in a directory; `settings` by their names.

    It has stopped, and written all it logs, when the block is left.
    """
    keys = _keys(state_dir, tenants)
    flags = {"threads": 1, "port": 0, "log_level": "warning", "state_dir": state_dir, **settings}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with on_core(core):
        server = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        yield Served(_port(server), keys, server.pid)
    finally:
        server.terminate()
        server.communicate()


def _keys(state_dir: Path, tenants: Iterable[str]) -> dict[str, str]:
    store = KeyStore(state_dir)
    pepper = pepper_of(Settings(state_dir=state_dir), store)
    keys = {}
    for tenant in tenants:
        keys[tenant], record = new_key(tenant, pepper)
        store.add(record)
    return keys


def _port(server: "subprocess.Popen[str]") -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if found := READY.search(line):
            return int(found.group(1))
    raise RuntimeError(f"sluice serve ended with status {server.wait()}")
