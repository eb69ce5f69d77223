"""The machine of a measurement, and the cores of its two sides."""

import os
import platform
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from backend import compiled_core

PACKAGES = ("torch", "transformers", "uvicorn", "starlette", "uvloop", "httptools")


def describe() -> dict[str, str]:
    """The facts of a comparison: processor, cores, memory, system, versions, commit, and load."""
    return {
        "cpu": f"{_processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "core": "compiled" if compiled_core.is_used() else "interpreted",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "commit": _commit(),
        "load average": "{:.2f} {:.2f} {:.2f}".format(*os.getloadavg()),
    }


def two_cores() -> tuple[int, int]:
    """The core that is measured and the core that measures; the same one where there is no second."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes started in the block run on `core` alone."""
    with on_cores({core}):
        yield


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """This thread, and processes started in the block, run on `cores` until it is left."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(pid: int) -> float:
    """The CPU seconds of a process so far, all threads together."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def num_writes() -> int:
    """Return how often this process has called the system to write, to sockets and files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["syscw"])


def children(pid: int, module: str) -> list[int]:
    """Returns the processes that this one has started to run a module, oldest first."""
    runs = f"-m\0{module}\0".encode()
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == pid]
    return sorted(child for child in found if runs in Path(f"/proc/{child}/cmdline").read_bytes())


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return git.stdout.strip() or "unknown"
