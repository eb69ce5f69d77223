#!/usr/bin/env python3
"""Rehearse a visit to a machine with a GPU, on one without: `scripts/rehearse_gpu_visit.py --python /path/to/python3`.

The interpreter is like the machine's, as in scripts/gpu_visit.py, which has gathered what it lacks. The printed command
runs in a clean clone, with no index to fetch from and nothing of ours installed; kernels are interpreted, small. What
came of it is written to labs/benchmarks/results/gpu/rehearsal.json. Exit status: 0 if every part ran.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound
from scripts.gpu_visit import COMMAND, GATHERED, RESULTS, ROOT, TRITON_CACHE, lacking, packages

TESTS = f"{COMMAND} test -m gpu tests/gpu"


def rehearse(python: str) -> dict[str, object]:
    there = packages(python)
    carried = {path.relative_to(GATHERED).as_posix(): path.stat().st_size for path in GATHERED.rglob("*.*")}
    shutil.rmtree(TRITON_CACHE.parent, ignore_errors=True)  # a machine that nobody has been to
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder) / "tree", Path(folder) / "out"
        subprocess.run(["git", "clone", "--quiet", "--local", ROOT, tree], check=True)
        shutil.copytree(GATHERED, tree / GATHERED.name)
        environ = {"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder, "PYTHON": python, "PIP_NO_INDEX": "1"}
        began, used = time.perf_counter(), _cpu_seconds()
        done = subprocess.run(**bound(["bash", "-c", COMMAND]), cwd=tree, env=environ | {"OUT": str(out)}, check=False)
        seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - used
        files = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
        parts = [part for file in sorted(out.glob("*.json")) for part in json.loads(file.read_text())["parts"]]
        core = "core /" in (out / "machine.txt").read_text(errors="replace")
        tests = subprocess.run(
            **bound(["bash", "-c", TESTS]), cwd=tree, env=environ, capture_output=True, text=True, check=False
        )
    return {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the rehearsing user's
        "command": COMMAND,
        "processor": platform.machine(),
        "packages": {name: there[name] for name in ("torch", "triton", "numpy", "transformers")},
        "lacking": lacking(there),
        "carried": carried,
        "exit status": done.returncode,
        "core": "compiled" if core else "interpreted",
        "parts": {part["part"]: _told(part) for part in parts},
        "files": files,
        "tests": next(line for line in reversed(tests.stdout.splitlines()) if " in " in line),
        "seconds": round(seconds),
        "CPU seconds": round(cpu_seconds),
    }


def _told(part: dict[str, object]) -> str:
    findings = part["findings"]
    assert isinstance(findings, list)
    skipped = [finding["value"] for finding in findings if str(finding["value"]).startswith("skipped")]
    missed = [finding["what"] for finding in findings if finding["exact"] and finding["met"] is False]
    return str(part["failure"]) or "; ".join(skipped + missed) or f"{len(findings)} findings"


def _cpu_seconds() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter like the machine's")
    result = rehearse(parser.parse_args().python)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "rehearsal.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(str(result["exit status"]))


if __name__ == "__main__":
    sys.exit(main())
