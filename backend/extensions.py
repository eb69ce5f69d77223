"""Packages beside the product may add commands, orders and batching rules: entry points of one group name them."""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

GROUP = "sluice.extensions"


@cache
def extensions() -> tuple[ModuleType, ...]:
    """Return the extensions that are installed.

    An extension has `COMMANDS`, the place `module:function` of each command that it adds to `sluice` by the command's
    name, and has registered its other choices once it is imported. One that is named but absent, as `labs` is in a
    wheel, is left out.
    """
    found = []
    for point in entry_points(group=GROUP):
        try:
            found.append(import_module(point.module))
        except ModuleNotFoundError as error:
            if error.name != point.module.partition(".")[0]:
                raise
    return tuple(found)
