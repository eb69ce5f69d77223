"""LiteLLM's proxy in an environment of its own, because its dependencies are many and pinned."""

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.random_llama import cache_dir

VERSION = "1.104.5"  # the latest whose dependencies were all on the index when this was measured
REQUIREMENT = f"litellm[proxy]=={VERSION}"
INSTALLED = "installed"  # a file that says that the installation was finished


def litellm_command() -> Path:
    """The environment's `litellm`; installs some 0.7 GB at first use, from the package index that pip is set up for."""
    directory = cache_dir() / f"litellm-{VERSION}"
    if not (directory / INSTALLED).exists():
        print(f"installing {REQUIREMENT} into {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True, clear=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", "--only-binary=:all:", REQUIREMENT], check=True)
        (directory / INSTALLED).touch()
    return directory / "bin" / "litellm"
