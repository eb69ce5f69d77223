#!/usr/bin/env python3
"""Send traces to Arize Phoenix and ask it for them: `scripts/check_phoenix.py [flags of pytest]`.

Installs Phoenix, some 1 GB, into an environment of its own below the cache directory ($SLUICE_CACHE_DIR, else
~/.cache/sluice) at first use, from the package index that pip is set up for. Exit status: pytest's.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.processes import ROOT
from tests.gateway.telemetry.phoenix import VARIABLE

REQUIREMENT = "arize-phoenix==20.26.1"


def main() -> int:
    command = [sys.executable, "-m", "pytest", "tests/end_to_end/test_phoenix.py", *sys.argv[1:]]
    environ = os.environ | {VARIABLE: str(own_environment(REQUIREMENT) / "phoenix")}
    return subprocess.run(**bound(command), cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
