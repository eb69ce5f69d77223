#!/usr/bin/env python3
"""Sign admins in at npm's `oidc-provider`, in Chromium: `scripts/check_oidc.py [flags of pytest]`.

Installs the provider by npm into a temporary directory. Exit status: pytest's.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound
from backend.timed_run import run_within
from labs.benchmarks.processes import ROOT
from tests.end_to_end.page.test_sign_in import NPM

REQUIREMENT = "oidc-provider@8.8.1"  # of the major version 9 and later: Node 22


def main() -> int:
    with TemporaryDirectory() as directory:
        run_within(600.0, ["npm", "install", "--silent", "--prefix", directory, REQUIREMENT])
        command = [sys.executable, "-m", "pytest", "tests/end_to_end/page/test_sign_in.py", *sys.argv[1:]]
        environ = os.environ | {NPM: directory}
        return subprocess.run(**bound(command), cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
