"""`sluice serve` in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from backend.bound_process import bound
from labs.benchmarks.machine import on_core
from labs.benchmarks.processes import ROOT, WorkerFailed

READY = re.compile(r"ready at http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A gateway that answers."""

    port: int
    pid: int


@contextmanager
def gateway_process(state_dir: Path, core: int | None = None, **settings: object) -> Iterator[GatewayProcess]:
    """Run it on a port of its own choice, and on one core where one is given; `settings` by their names.

    It has stopped, and written all it logs, when the block is left. Raises `WorkerFailed` when it does not start.
    """
    flags = {"port": 0, "admin_port": 0, "log_level": "warning", "state_dir": state_dir, **settings}
    named = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    arguments = [name if value is True else f"{name}={value}" for name, value in named.items()]
    with nullcontext() if core is None else on_core(core):
        process = subprocess.Popen(
            **bound([sys.executable, "-m", "sluice", "serve", *arguments]),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        yield GatewayProcess(_port(process), process.pid)
    finally:
        process.terminate()
        process.communicate()


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.search(line):
            return int(found.group(1))
    raise WorkerFailed(f"sluice serve ended with status {process.wait()}")
