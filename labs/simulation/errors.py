"""The errors of a simulation.

SimulationError
├── TraceError     a trace that cannot be read: names the file and the line
└── OptionError    an option that makes no sense: names it, what it was given and what would work
"""

from pathlib import Path

from backend.errors import ConfigError
from gateway.quoting import quoted


class SimulationError(ConfigError):
    """The base of the simulator's own errors."""


class TraceError(SimulationError):
    """A trace cannot be read; `line` counts from 1."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")


class OptionError(SimulationError):
    """An option makes no sense; `option` is named as the user wrote it."""

    def __init__(self, option: str, given: object, reason: str) -> None:
        super().__init__(f"{option}: {reason}; got {quoted(given) if isinstance(given, str) else given}")
