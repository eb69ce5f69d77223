"""A process's memory, and its growth with the work done."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

_PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident bytes of the process `pid`, or of this one."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * _PAGE


@dataclass(slots=True)
class Growth:
    """A figure over work done: memory by requests answered, descriptors by minutes."""

    samples: list[tuple[float, float]] = field(default_factory=list)  # work done, and the figure then

    def add(self, work: float, value: float) -> None:
        self.samples.append((work, value))

    def since(self, warm: float) -> float:
        """Return the growth from the first to the last quarter of the work after `warm`, by medians; 0 without samples.

        A figure that rises without end shows here; one that swings does not.
        """
        values = [value for work, value in self.samples if work >= warm]
        quarter = max(1, len(values) // 4)
        return median(values[-quarter:]) - median(values[:quarter]) if values else 0.0
