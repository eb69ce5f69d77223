"""Packages beside the product that add commands and choices. `labs` is one, in a checkout or with its extra."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from backend.own_process import ROOT

PACKAGES = ("labs",)


@cache
def extensions() -> tuple[ModuleType, ...]:
    """Return the module `extension` of each package that lies beside this one; a package elsewhere is a stranger's.

    It has `COMMANDS`, the place `module:function` of each command that it adds to `sluice` by the command's name, and
    `CHOICES` and `ROUTINGS`, the names of modules that add choices to those of the core and of a router when imported,
    and `PLAN`, the place of the function that adds flags to `sluice plan`.
    """
    there = [name for name in PACKAGES if (Path(ROOT) / name / "extension.py").is_file()]
    return tuple(import_module(f"{name}.extension") for name in there)
