"""A visit to a machine with a GPU: what is carried there, what runs there in which order, and what is kept of it."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_visit

BOX = gpu_visit.ROOT / "scripts" / "gpu_box"

# Writes down each call. Of `check_gpu.py` it writes an empty file of figures, and ends with the status that is asked.
STAND_IN = """\
#!/usr/bin/env bash
case "$*" in
*check_gpu.py*)
    echo "$*" >>"$CALLS"
    while [[ $1 != --json ]]; do shift; done
    echo '{"parts": []}' >"$2"
    [[ $* != *"correctness"* ]] || exit "${WRONG:-0}" ;;
"-m pytest"*) echo "$*" >>"$CALLS" ;;
*home*) echo "$HOME/core" ;;
esac
"""


def visit(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, list[list[str]], list[str]]:
    """Exit status, the parts of each check or the arguments of tests, and the files that came back."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(python), "CALLS": str(calls), "OUT": str(out), "HOME": str(tmp_path)}
    environ |= {"GPU_BOX_DIR": str(tmp_path / "at"), **variables}
    done = subprocess.run([BOX, *arguments], env=environ, capture_output=True, text=True, check=False)
    said = [line.split() for line in calls.read_text().splitlines()]
    parts = [call[call.index("--parts") + 1 :] if "--parts" in call else call for call in said]
    return done.returncode, parts, sorted(file.name for file in out.iterdir())


def test_a_visit_asks_what_is_right_before_what_is_fast(tmp_path: Path) -> None:
    status, parts, files = visit(tmp_path)
    assert status == 0
    assert parts == [
        ["environment", "compile", "correctness", "serving", "agreement"],
        ["engine", "llama-3-8b", "http"],
        ["kernels"],
    ]
    assert {"machine.txt", "right.json", "fast.json", "fast.log", "kernels.json", "triton.txz"} <= set(files)
    assert len(files) <= 8, "no more come back from some machines"


def test_a_kernel_that_computes_wrongly_is_searched_for_its_fault_and_not_measured(tmp_path: Path) -> None:
    _, parts, files = visit(tmp_path, WRONG="3")
    assert parts[1:] == [["sanitize"]]
    assert len(files) <= 8


@pytest.mark.parametrize("status", ["1", "143"])
def test_a_part_that_failed_or_had_no_time_keeps_no_other_from_being_measured(status: str, tmp_path: Path) -> None:
    assert visit(tmp_path, WRONG=status)[1][1:] == [["engine", "llama-3-8b", "http"], ["kernels"]]


def test_parts_are_run_again_with_the_flags_that_are_given(tmp_path: Path) -> None:
    _, parts, files = visit(tmp_path, "--parts", "engine", "--without-graphs")
    assert parts == [["engine", "--without-graphs"]]
    assert "again.json" in files
    test = visit(tmp_path, "test", "-m", "gpu", "tests/gpu")[1][-1]
    assert test[-3:] == ["-m", "gpu", "tests/gpu"]


def test_commands_fit_what_a_machine_takes() -> None:
    assert len(gpu_visit.COMMAND) < len(gpu_visit.AGAIN) < 2000


def test_a_package_that_the_machine_has_is_carried_only_if_it_is_too_old() -> None:
    every = gpu_visit.lacking({})
    names = {wheel.partition("==")[0] for wheel in every}
    assert names >= {"starlette", "orjson", "pydantic", "pydantic-core", "redis", "hiredis", "pytest-asyncio", "httpx"}
    assert not names & {"torch", "triton", "uvicorn-worker", "ruff"}
    there = {name: version(name) for name in names - {"starlette", "protobuf", "grpcio"}} | {"protobuf": "3.20.0"}
    carried = {wheel.partition("==")[0] for wheel in gpu_visit.lacking(there)}
    assert carried - gpu_visit.ALWAYS == {"starlette", "grpcio"}
    assert "protobuf" in carried


def finding(what: str, met: bool | None, value: float | str = 1.0) -> dict[str, Any]:
    bound = None if met is None else 1.0
    return {"what": what, "value": value, "unit": "", "bound": bound, "sense": ">=", "exact": False, "met": met}


def part(name: str, *findings: dict[str, Any], failure: str = "") -> dict[str, Any]:
    return {"part": name, "findings": list(findings), "failure": failure, "seconds": 1.0}


def write(file: Path, *parts: dict[str, Any]) -> None:
    about = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "date": "2026-12-01"}
    file.write_text(json.dumps(about | {"parts": list(parts)}))


def test_figures_of_a_visit_are_kept_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_visit, "RESULTS", gpu_visit.ROOT / "benchmarks" / tmp_path / "results")
    monkeypatch.setattr(gpu_visit, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_visit, "GATHERED", tmp_path / "gathered")
    write(
        tmp_path / "right.json",
        part("correctness", finding("kernels", True)),
        part("serving", finding("heads", False)),
        part("agreement", failure='Traceback\n  File "/root/tree/x.py"\nRuntimeError: no /root/tree/x.py'),
    )
    write(tmp_path / "again.json", part("serving", finding("heads", True)))
    os.utime(tmp_path / "right.json", (0, 0))
    (tmp_path / "machine.txt").write_text("    Driver Version : 580.1\ncore /opt/core-1\ntorch 2.11.0\n")
    (tmp_path / "triton.txz").write_bytes(b"kernels")
    assert gpu_visit.record(tmp_path) == 0
    kept = json.loads((tmp_path / "results" / "nvidia-h100-80gb-hbm3-2026-12-01.json").read_text())
    rows = {row["row"]: row["said"] for row in kept["acceptance"]}
    assert (rows[1], rows[2], rows[3]) == ("met", "failed", "not run"), "what was run again counts"
    assert [row["not_run"] for row in kept["acceptance"][:3]] == [[], [], ["same"]]
    assert kept["machine"] == {"Driver Version": "580.1", "core": "compiled", "torch": "2.11.0"}
    assert "/root" not in json.dumps(kept)
    assert (tmp_path / "gathered" / "triton.txz").exists(), "the next visit finds the kernels"
    assert "heads" in capsys.readouterr().out
