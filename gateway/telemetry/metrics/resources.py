"""What the process takes of its machine, under the names that Prometheus' client libraries give it."""

import os
import resource
import time
from pathlib import Path

from gateway.telemetry.metrics.registry import Registry

_PROC = Path("/proc/self")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


def show_resources(registry: Registry) -> None:
    """Each is read from the kernel when somebody asks, in some tens of microseconds."""
    started = _start_time()
    registry.gauge("process.resident_memory", "Memory of the process in RAM.", _resident_bytes, "By")
    registry.total("process.cpu", "Processor time of all its threads.", time.process_time, "s")
    registry.gauge("process.open_fds", "Open file descriptors.", _open_fds)
    registry.gauge("process.max_fds", "How many may be open.", _max_fds)
    registry.gauge("process.threads", "Threads, those of libraries included.", _threads)
    registry.gauge("process.start_time", "When it started, since the epoch.", lambda: started, "s")


def _resident_bytes() -> int:
    return int((_PROC / "statm").read_text().split()[1]) * _PAGE


def _open_fds() -> int:
    """Linux 6.2 and newer say how many without listing them. Where none is left to list them with, all are open."""
    try:
        return (_PROC / "fd").stat().st_size or len(os.listdir(_PROC / "fd")) - 1  # noqa: PTH208 - as many as needed
    except OSError:
        return _max_fds()


def _max_fds() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft


def _threads() -> int:
    return int(_stat()[17])


def _start_time() -> float:
    (boot,) = (line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot) + int(_stat()[19]) / _TICK


def _stat() -> list[str]:
    """The fields of proc(5)'s `stat` from the third, which follows the program's name."""
    return (_PROC / "stat").read_text().rpartition(")")[2].split()
