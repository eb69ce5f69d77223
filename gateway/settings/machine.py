"""What this machine and this process may use: processor cores, and open files."""

import os
import resource
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
ADMIN_CONNECTIONS = 32
SPARE_FILES = 64 + ADMIN_CONNECTIONS  # descriptors kept for weights, logs and libraries beside the connections
MOST_CONNECTIONS = 4096  # by default
LEAST_CONNECTIONS = 16  # which a default is not below


def spare_cores() -> int:
    """All cores but one, which is left to the event loop; at least 1."""
    return max(1, usable_cores() - 1)


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Cores this process is scheduled on, or the container's quota of processor time where that is less.

    The quota is cgroup v2's: "$MAX $PERIOD" in microseconds, or "max" for none.
    """
    scheduled = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(scheduled, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return scheduled


def most_connections() -> int:
    """As many as this process may open files for, within what is sensible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(LEAST_CONNECTIONS, hard - SPARE_FILES))
