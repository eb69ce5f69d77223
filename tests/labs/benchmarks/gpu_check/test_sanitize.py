import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from labs.benchmarks.gpu_check import sanitize
from labs.benchmarks.processes import ROOT

CLEAN = """\
ran 9 steps
========= {summary}
"""
SUMMARIES = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
RACE = """\
ran 9 steps
========= Error: Race reported between Write access at _decode+0x4b0 in paged_decode.py:150
=========     and Read access at _decode+0x900 in paged_decode.py:156 [508 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def tool(folder: Path, said: dict[str, str], after: str = "") -> str:
    """A tool that says what its real one might, to be called as that one."""
    for name, text in said.items():
        (folder / name).write_text(text)
    path = folder / "compute-sanitizer"
    path.write_text(f'#!/bin/sh\ncat "{folder}/$2"\n{after}\n')
    path.chmod(0o755)
    return str(path)


def test_kernels_without_faults_are_told_as_such(tmp_path: Path) -> None:
    said = {name: CLEAN.format(summary=summary) for name, summary in SUMMARIES.items()}
    found = list(sanitize.under(tool(tmp_path, said)))
    assert [(finding.what, finding.value) for finding in found] == [
        ("memcheck: errors", 0),
        ("memcheck: ran", "9 steps"),
        ("racecheck: errors", 0),
        ("racecheck: ran", "9 steps"),
    ]


def test_errors_are_counted_and_their_kernels_named(tmp_path: Path) -> None:
    said = {"memcheck": CLEAN.format(summary=SUMMARIES["memcheck"]), "racecheck": RACE}
    race, where, _ = list(sanitize.under(tool(tmp_path, said)))[2:]
    assert (race.what, race.value, race.met) == ("racecheck: errors in _decode", 1, False)
    assert where.value == "Write at _decode 0x4b0 paged_decode.py:150 and Read at _decode 0x900 paged_decode.py:156"


def test_what_a_tool_found_counts_though_its_process_then_failed(tmp_path: Path) -> None:
    frames = "".join(f"frame #{number}: PyGC_Collect + 0x58\n" for number in range(30))
    failed = RACE.replace("ran 9 steps", f"DeviceError: step 7 failed on cuda:0\n{frames}")
    said = {"memcheck": CLEAN.format(summary=SUMMARIES["memcheck"]), "racecheck": failed}
    finding = sanitize.under(tool(tmp_path, said))
    found = [next(finding) for _ in range(4)]
    with pytest.raises(RuntimeError, match="step 7 failed"):
        next(finding)
    assert ("racecheck: errors in _decode", False) in [(finding.what, finding.met) for finding in found]


def test_where_the_newer_tool_does_not_come_to_its_end_the_other_is_taken(tmp_path: Path) -> None:
    tools = []
    for name, said in (("newer", "Error: driver"), ("older", CLEAN)):
        (tmp_path / name).mkdir()
        what = {kind: said.format(summary=summary) for kind, summary in SUMMARIES.items()}
        tools.append(tool(tmp_path / name, what))
    assert [finding.value for finding in sanitize.by_one_of(tools)] == [0, "9 steps"] * 2
    with pytest.raises(RuntimeError, match="driver"):
        list(sanitize.by_one_of(tools[:1]))


def test_every_kernel_that_is_launched_is_looked_at() -> None:
    """Functions that are called within kernels belong to those."""
    launched: set[str] = set()
    for file in (ROOT / "backend" / "kernels").glob("*.py"):
        launched |= set(re.findall(r"\b(_\w+)\[", file.read_text()))
    kernels = {
        name
        for file in (ROOT / "backend" / "kernels").glob("*.py")
        for name in re.findall(r"@triton\.jit[^\n]*\ndef (_\w+)\(", file.read_text())
    }
    assert {"_decode"} < launched & kernels <= set(sanitize.KERNELS)


@pytest.mark.parametrize("said", ["========= ERROR SUMMARY: 0 errors", "ran 9 steps", ""])
def test_a_tool_that_does_not_come_to_its_end_shows_nothing(tmp_path: Path, said: str) -> None:
    with pytest.raises(RuntimeError, match="memcheck did not come to its end"):
        list(sanitize.under(tool(tmp_path, dict.fromkeys(SUMMARIES, said))))


def test_a_machine_that_the_tool_refuses_is_told_of_it(tmp_path: Path) -> None:
    found = sanitize.under(tool(tmp_path, dict.fromkeys(SUMMARIES, "========= Error: Device not supported")))
    assert [finding.value for finding in found] == ["skipped: Device not supported"] * 2


def test_a_tool_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "SECONDS", 0.5)
    started = tmp_path / "started"
    hanging = tool(tmp_path, dict.fromkeys(SUMMARIES, "ran nothing"), f'sleep 600 & echo $! >>"{started}"; wait')
    with pytest.raises(RuntimeError, match="ended after"):
        list(sanitize.under(hanging))
    children = [int(line) for line in started.read_text().split()]
    assert children
    while any(runs(pid) for pid in children):  # what is killed takes a moment to be gone
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process runs, which a zombie does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_machine_without_the_tool_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    told = [finding.value for finding in sanitize.check(torch.device("cpu"))]
    assert told == ["skipped: needs compute-sanitizer"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_the_tools_look_at_runs_interpreted() -> None:
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "labs.benchmarks.gpu_check.sanitized"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("ran "), done.stderr
