"""The running program, as its admin sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp


@dataclass(frozen=True, slots=True)
class Process:
    """What the admin plane needs to know of it beside the service, and may do to it."""

    version: str
    device: str
    probes: Mapping[str, ASGIApp]  # by path
    is_draining: Callable[[], bool]
    drain: Callable[[], object]  # stop in order
