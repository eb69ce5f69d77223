"""Processes of this program's own modules, from the very sources that this process runs, installed or in a tree."""

import os
import sys
import sysconfig
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command of a module. It imports nothing from the working directory, which may be any user's."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def module_environment() -> dict[str, str]:
    """Return the environment in which that command finds the sources, if no installation leads to them."""
    if ROOT in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, before] if before else [ROOT])}
