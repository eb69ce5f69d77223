import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from backend.kernels.self_check import disagreements
from backend.kernels.triton_ops import TritonOps
from labs.benchmarks.gpu_check import sanitize, sanitized
from labs.benchmarks.gpu_check.compiling import launch_sanitized
from labs.benchmarks.gpu_check.paper_gpu import META, paper_gpu
from labs.benchmarks.processes import ROOT

CLEAN = """\
2.5 s: 0 of 9 steps ran, then masks
ran 9 steps of 9
========= {summary}
"""
SUMMARIES = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
RACE = """\
ran 9 steps of 9
========= Error: Race reported between Write access at _decode+0x4b0 in paged_decode.py:150
=========     and Read access at _decode+0x900 in paged_decode.py:156 [508 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


DIED = """\
2.5 s: 0 of 9 steps ran, then masks
3.1 s: 1 of 9 steps ran, then bf16: a prompt
"""
STARTED = """\
case "$*" in
  *" -c "*) echo "started: True"; echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors"; exit;;
esac
"""


def tool(folder: Path, said: dict[str, str], after: str = "", before: str = "") -> str:
    """A tool that says what its real one might, to be called as that one."""
    folder.mkdir(exist_ok=True)
    for name, text in said.items():
        (folder / name).write_text(text)
    path = folder / "compute-sanitizer"
    path.write_text(f'#!/bin/sh\n{before}\ncat "{folder}/$2"\n{after}\n')
    path.chmod(0o755)
    return str(path)


def clean() -> dict[str, str]:
    return {name: CLEAN.format(summary=summary) for name, summary in SUMMARIES.items()}


def found_under(own: str | None, carried: str | None = None) -> tuple[dict[str, float | str], str]:
    """What was found, and why it failed."""
    found = dict[str, float | str]()
    try:
        for finding in sanitize.under(own, carried):
            found[finding.what] = finding.value
    except RuntimeError as error:
        return found, str(error)
    return found, ""


def short(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(sanitize, "TOOL_SECONDS", dict.fromkeys(SUMMARIES, seconds))
    monkeypatch.setattr(sanitize, "SECONDS_TO_START", seconds)


def test_kernels_without_faults_are_told_as_such(tmp_path: Path) -> None:
    found, failure = found_under(tool(tmp_path, clean()))
    assert not failure
    assert found == {
        "racecheck: whose": "the machine's",
        "memcheck: errors": 0,
        "memcheck: ran": "9 steps of 9",
        "memcheck: steps that time was too short for": 0,
        "racecheck: errors": 0,
        "racecheck: ran": "9 steps of 9",
        "racecheck: steps that time was too short for": 0,
    }


def test_errors_are_counted_and_their_kernels_named(tmp_path: Path) -> None:
    findings = list(sanitize.under(tool(tmp_path, clean() | {"racecheck": RACE}), None))
    (race,) = [finding for finding in findings if finding.what == "racecheck: errors in _decode"]
    (where,) = [finding for finding in findings if finding.what == "racecheck: race"]
    assert (race.value, race.met) == (1, False)
    assert where.value == "Write at _decode 0x4b0 paged_decode.py:150 and Read at _decode 0x900 paged_decode.py:156"


def test_a_tool_that_fails_hides_nothing_of_the_other(tmp_path: Path) -> None:
    found, failure = found_under(tool(tmp_path, clean() | {"memcheck": DIED}))
    assert "memcheck did not come to its end" in failure
    assert "memcheck: errors" not in found
    assert found["racecheck: errors"] == 0


def test_steps_for_which_time_was_too_short_are_missed(tmp_path: Path) -> None:
    said = clean()["racecheck"].replace("ran 9", "ran 4")
    found, failure = found_under(tool(tmp_path, clean() | {"racecheck": said}))
    assert not failure
    assert found["racecheck: ran"] == "4 steps of 9"
    assert found["racecheck: steps that time was too short for"] == 5
    assert found["racecheck: at"] == "2.5 s: 0 of 9 steps ran, then masks"


@pytest.mark.parametrize(
    ("after", "before", "whose"),
    [
        ("", STARTED, "carried"),
        ("", "", "the machine's"),
        ("", "exit 1", "the machine's"),
        ("sleep 600", "", "the machine's"),
    ],
)
def test_a_carried_tool_looks_for_races_where_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, before: str, whose: str
) -> None:
    monkeypatch.setattr(sanitize, "SECONDS_TO_START", 0.5 if after else 8.0)
    own = tool(tmp_path / "own", clean())
    carried = tool(tmp_path / "carried", {"memcheck": "", "racecheck": CLEAN.format(summary="")}, after, before)
    found, failure = found_under(own, carried)
    assert found["racecheck: whose"] == whose
    assert found["memcheck: errors"] == 0
    assert ("racecheck did not come to its end" in failure) == (whose == "carried")


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


@pytest.mark.parametrize("said", ["========= ERROR SUMMARY: 0 errors", "ran 9 steps of 9", ""])
def test_a_tool_that_does_not_come_to_its_end_shows_nothing(tmp_path: Path, said: str) -> None:
    found, failure = found_under(tool(tmp_path, dict.fromkeys(SUMMARIES, said)))
    assert "memcheck did not come to its end" in failure
    assert "memcheck: errors" not in found


def test_a_machine_that_the_tool_refuses_is_told_of_it(tmp_path: Path) -> None:
    refused = tool(tmp_path, dict.fromkeys(SUMMARIES, "========= Error: Device not supported"))
    found, failure = found_under(refused)
    assert not failure
    assert [found[name] for name in SUMMARIES] == ["skipped: Device not supported"] * 2


def test_a_tool_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch, 0.5)
    started = tmp_path / "started"
    said = dict.fromkeys(SUMMARIES, DIED + "========= Error: Race reported between Write access at _decode+0x4b0\n")
    hanging = tool(tmp_path, said, f'sleep 600 & echo $! >>"{started}"; wait')
    found, failure = found_under(hanging)
    assert "memcheck did not come to its end" in failure and "ended after 0.5 s" in failure
    for name in SUMMARIES:
        assert found[f"{name}: errors in _decode"] == 1
        assert found[f"{name}: ran"] == "1 steps of 9"
        assert found[f"{name}: at"] == "3.1 s: 1 of 9 steps ran, then bf16: a prompt"
    children = [int(line) for line in started.read_text().split()]
    assert len(children) == 2
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
def test_the_sanitized_programs_run_interpreted() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "labs.benchmarks.gpu_check.sanitized"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ran 8 steps of 8\n"), done.stderr


@pytest.mark.parametrize("numbers", sanitized.NUMBERS, ids=lambda numbers: numbers.name)
def test_the_steps_launch_every_kernel_of_the_layers_and_of_sampling(numbers: sanitized.Numbers) -> None:
    """A kernel that no step launches would be found faultless."""
    launched = set[str]()
    with paper_gpu(90, lambda kernel, _args, _constants: launched.add(kernel.fn.__name__)):
        launch_sanitized(numbers, sanitized.SIZE)
        disagreements(TritonOps(), torch.float32)
        sanitized.multiply_packed(META)
    assert launched == set(sanitize.KERNELS)
