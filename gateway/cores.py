"""How many processor cores this process may use."""

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


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
