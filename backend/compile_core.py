"""Compiles the core: `python -m backend.compile_core`.

Compilation takes mypy and setuptools, a C compiler and Python's headers, 1 GB of memory and some three minutes of a
core. See `compiled_core`: it is optional, and the interpreted core decides the same.
"""

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from backend.compiled_core import GROUP, MODULES, compiled, directory_name, has_tools, home, how_to_compile, sources
from backend.timed_run import end_on_signals, run_within

log = logging.getLogger(__name__)

COMPILE_SECONDS = 900.0
OPTIMIZATION = 2  # the level of the C compiler
SETUP = """\
from setuptools import setup
from mypyc.build import mypycify

flags = ["--config-file=", "--cache-dir=/dev/null"]
modules = mypycify([*flags, *{files}], group_name={group!r}, opt_level="{level}", debug_level="0")
setup(name={group!r}, ext_modules=modules, packages=[], py_modules=[])
"""


def compile_core(optimization: int = OPTIMIZATION) -> Path | None:
    """Compile now, and delete modules compiled from other sources. Returns the directory, or None with the reason
    logged.
    """
    if not has_tools():
        log.warning("mypy and setuptools are needed to compile the core: %s", how_to_compile())
        return None
    contents = sources()
    target = home() / directory_name(contents)
    try:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home(), prefix="compiling-") as scratch:
            _compile(contents, Path(scratch), optimization).replace(target)
    except subprocess.CalledProcessError as error:
        log.warning("compiling the core failed, it stays interpreted:\n%s", (error.stdout + error.stderr)[-2000:])
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("compiling the core failed, it stays interpreted: %s", error)
        return None
    for other in home().glob("core-*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return target


def _compile(contents: Mapping[str, bytes], scratch: Path, optimization: int) -> Path:
    """Compile a copy of the sources, which no edit changes meanwhile; returns the directory of the modules."""
    copy, made = scratch / "sources", scratch / "made"
    for name, content in contents.items():
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    setup = copy / "setup.py"
    setup.write_text(SETUP.format(files=files, group=GROUP, level=optimization))
    command = [sys.executable, setup.name, "build_ext", f"--build-lib={made}", f"--build-temp={scratch}"]
    run_within(COMPILE_SECONDS, command, cwd=copy)
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m backend.compile_core", description="Compile the core.")
    parser.add_argument(
        "--optimization", type=int, default=OPTIMIZATION, metavar="LEVEL", help="of the C compiler, 0 to 3"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (directory := compiled()) is not None:
        sys.stdout.write(f"up to date: {directory}\n")
    elif (directory := compile_core(options.optimization)) is not None:
        sys.stdout.write(f"compiled the core into {directory}\n")
    return 0 if directory is not None else 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
