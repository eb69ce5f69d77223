"""The processor cores, open files and memory available to this process."""

import os
import resource
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
ADMIN_CONNECTIONS = 32
SPARE_FILES = 64 + ADMIN_CONNECTIONS  # descriptors kept for weights, logs and libraries beside the connections
MAX_DEFAULT_CONNECTIONS = 4096  # the highest default
MIN_DEFAULT_CONNECTIONS = 16  # the lowest default
GC_THRESHOLDS = (50_000, 20, 100)  # a request makes thousands of objects, and hardly ever a cycle
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def spare_cores() -> int:
    """The number of cores less one, which is left to the event loop; at least 1."""
    return max(1, usable_cores() - 1)


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """The cores this process may run on, or the container's quota of processor time if that is less.

    The quota is cgroup v2's: "$MAX $PERIOD" in microseconds, or "max" for none.
    """
    scheduled = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(scheduled, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return scheduled


def most_connections() -> int:
    """The number of connections for which this process may open files, between the defaults' bounds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MAX_DEFAULT_CONNECTIONS
    return min(MAX_DEFAULT_CONNECTIONS, max(MIN_DEFAULT_CONNECTIONS, hard - SPARE_FILES))


def allow_files(needed: int) -> bool:
    """Raise this process's limit of open files; returns False if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most == needed


def most_http_workers() -> int:
    """The default number of HTTP workers: one for every 4 cores, at most 8."""
    return min(8, usable_cores() // 4)


def resident_bytes() -> int:
    """This process's resident memory in bytes."""
    return int(_STATM.read_text().split()[1]) * _PAGE
