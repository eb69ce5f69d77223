"""Programs with many pinned dependencies, each in a virtual environment of its own."""

import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from backend.bound_process import bound
from labs.benchmarks.cache import cache_dir

INSTALLED = "installed"  # a file that says that the installation was finished


def own_environment(
    requirement: str, unused: Sequence[str] = (), also: Sequence[str] = (), compiled: Sequence[str] = ()
) -> Path:
    """The folder of programs of an environment that has `requirement` (NAME==VERSION), without what is `unused`.

    What is needed `also` goes with it, such as the version of a dependency that is to be had. What is `compiled` is
    made from its sources here; all else is installed as it was published.

    It is below the cache directory, made at first use from the package index that pip is set up for.
    """
    directory = cache_dir() / re.sub(r"(\[.*\])?==", "-", requirement)
    programs = directory / "bin"
    if not (directory / INSTALLED).exists():
        print(f"installing {requirement} into {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True, clear=True)
        sources = [f"--no-binary={name}" for name in compiled]
        pip = [str(programs / "python"), "-m", "pip", "--quiet"]
        command = [*pip, "install", "--only-binary=:all:", *sources, requirement, *also]
        subprocess.run(**bound(command), check=True)
        if unused:
            subprocess.run(**bound([*pip, "uninstall", "--yes", *unused]), check=True)
        (directory / INSTALLED).touch()
    return programs
