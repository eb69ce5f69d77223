"""scripts/check_gpu.py without a GPU: every part runs, interpreted and small, and none takes the others down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import bound

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "check_gpu.py"
PARTS = {
    "environment", "correctness", "serving", "agreement", "engine", "llama-3-8b", "qwen3-0.6b", "beside", "http",
    "kernels",
}  # fmt: skip
NOT_ON_A_BARE_MACHINE = (
    "huggingface_hub", "hiredis", "httpx", "hypothesis", "opentelemetry", "orjson", "pydantic", "pydantic_settings",
    "pytest", "redis", "starlette", "tqdm", "transformers", "uvicorn", "uvloop", "yaml",
)  # fmt: skip
CRASHED = """
from scripts.check_gpu import run_apart
result = run_apart("unheard-of", 60)
assert result.failure.startswith("ended with status 2") and "invalid choice" in result.failure, result.failure
"""
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
import backend, benchmarks.gpu_check
for package in (backend, benchmarks.gpu_check):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""
OVER_HTTP = """
from scripts.check_gpu import Finding, Result, over_http
http, engine = (Result(part, [Finding("", rate, "tok/s")]) for part, rate in (("http", 80.0), ("engine", 100.0)))
assert [found.value for found in over_http([http, engine])] == [0.8] and over_http([http]) == []
"""

pytest.importorskip("triton")


def check(tmp_path: Path, *flags: str) -> tuple[int, str, dict[str, dict[str, object]]]:
    """Exit status, what was printed, and the parts by name."""
    file = tmp_path / "figures.json"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = bound([sys.executable, SCRIPT, "--json", file, *flags])
    done = subprocess.run(**command, env=environ, capture_output=True, text=True, check=False)
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, {part["part"]: part for part in json.loads(file.read_text())["parts"]}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_part_runs(tmp_path: Path) -> None:
    status, printed, parts = check(tmp_path)
    assert status == 0, printed
    assert parts.keys() == PARTS
    for name, part in parts.items():
        assert part["failure"] == "" and part["findings"], name
    assert "MISS" not in printed
    assert "greedy tokens equal to those of transformers" in printed
    assert "over HTTP: output tokens/s" in printed


@pytest.mark.timeout(300)
def test_a_part_in_a_process_of_its_own_is_reported_alike(tmp_path: Path) -> None:
    status, printed, parts = check(tmp_path, "--apart", "--parts", "environment", "engine")
    assert status == 0, printed
    assert [len(parts[name]["findings"]) for name in ("environment", "engine")] == [2, 3]  # type: ignore[arg-type]


@pytest.mark.timeout(300)
def test_a_part_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    status, printed, parts = check(tmp_path, "--apart", "--parts", "kernels", "environment", "--seconds", "1.5")
    assert status == 1
    assert "took longer than" in str(parts["kernels"]["failure"])
    assert parts["environment"]["failure"] == "no time was left"
    assert "FAILED" in printed


def test_a_part_that_crashes_is_told_with_the_end_of_its_errors() -> None:
    subprocess.run([sys.executable, "-c", CRASHED], cwd=ROOT, check=True)


def test_http_is_held_against_offline_in_whatever_order_they_were_measured() -> None:
    subprocess.run([sys.executable, "-c", OVER_HTTP], cwd=ROOT, check=True)


def test_the_engine_imports_on_a_machine_without_the_gateways_packages() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(NOT_ON_A_BARE_MACHINE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
