#!/usr/bin/env python3
"""Send traces to Arize Phoenix and ask it for them: scripts/check_phoenix.py [flags of pytest]

Installs Phoenix, some 1 GB, into an environment of its own below the cache directory ($SLUICE_CACHE_DIR, else
~/.cache/sluice) at first use, from the package index that pip is set up for. Exit status: pytest's.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT
from benchmarks.random_llama import cache_dir
from tests.gateway.telemetry.phoenix import VARIABLE

REQUIREMENT = "arize-phoenix==20.26.1"
INSTALLED = "installed"  # a file that says that the installation was finished


def main() -> int:
    command = [sys.executable, "-m", "pytest", "tests/gateway/telemetry/test_phoenix.py", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {VARIABLE: str(phoenix())}, check=False).returncode


def phoenix() -> Path:
    """The environment's executable."""
    directory = cache_dir() / REQUIREMENT.replace("==", "-")
    if not (directory / INSTALLED).exists():
        print(f"installing {REQUIREMENT} into {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True, clear=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", "--only-binary=:all:", REQUIREMENT], check=True)
        (directory / INSTALLED).touch()
    return directory / "bin" / "phoenix"


if __name__ == "__main__":
    sys.exit(main())
