"""scripts/check_gpu.py without a GPU: every part runs, interpreted and small, and none takes the others down."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.bound_process import bound
from tests.gateway.server_process import eventually
from tests.quotas.stores import is_running

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_gpu.py"
PARTS = {
    "environment", "compile", "correctness", "serving", "agreement", "engine", "llama-3-8b", "qwen3-0.6b", "beside",
    "http", "kernels", "same", "masks", "packed", "adapters", "leak", "sanitize", "tenants", "embeddings", "fa3",
    "peers", "vllm",
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
import backend, labs.benchmarks.gpu_check
for package in (backend, labs.benchmarks.gpu_check):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""
PARTS_AND_RATES = """
from scripts.check_gpu import PARTS, Finding, Result, over_http
from scripts.gpu_visit import ROWS
first = "environment compile correctness serving agreement engine llama-3-8b http".split()
assert list(PARTS)[: len(first)] == first, "in another order"
assert sum(PARTS[name].seconds for name in first) <= 320
assert PARTS["kernels"].seconds <= 100
http, engine = (Result(part, [Finding("", rate, "tok/s")]) for part, rate in (("http", 80.0), ("engine", 100.0)))
assert [found.value for found in over_http([http, engine])] == [0.8] and over_http([http]) == []
assert PARTS.keys() - {"environment", "compile"} <= {name for row in ROWS for name in row.shown_by}
"""
ENVIRON = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

pytest.importorskip("triton")


def findings(part: dict[str, object]) -> list[dict[str, str]]:
    found = part["findings"]
    assert isinstance(found, list)
    return found


def held_to_speed(finding: dict[str, str]) -> bool:
    return finding["bound"] is not None and not finding["exact"]


def check(tmp_path: Path, *flags: str) -> tuple[int, str, dict[str, dict[str, object]]]:
    """Exit status, what was printed, and the parts by name."""
    file = tmp_path / "figures.json"
    command = bound([sys.executable, SCRIPT, "--json", file, *flags])
    done = subprocess.run(**command, env=ENVIRON, capture_output=True, text=True, check=False)
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
    assert "answers that part from those of transformers" in printed
    assert "over HTTP: output tokens/s" in printed
    speeds = [finding for part in parts.values() for finding in findings(part) if held_to_speed(finding)]
    assert {finding["unit"] for finding in speeds if "between tokens" not in finding["what"]} == {""}, "a card's number"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_part_in_a_process_of_its_own_is_reported_alike(tmp_path: Path) -> None:
    status, printed, parts = check(tmp_path, "--apart", "--parts", "environment", "engine")
    assert status == 0, printed
    told = {finding["what"] for finding in findings(parts["environment"])}
    assert told >= {"core", "copy, read and written, kernel's"}
    assert [finding["unit"] for finding in findings(parts["engine"]) if held_to_speed(finding)] == ["", ""]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_part_ended_midway_leaves_its_figures_and_no_process(tmp_path: Path, number: int) -> None:
    file = tmp_path / "figures.json"
    command = bound(
        [sys.executable, SCRIPT, "--json", file, "--apart", "--parts", "environment", "kernels", "agreement"]
    )
    with subprocess.Popen(**command, env=ENVIRON, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "copy bandwidth" in line:
                break
        (part,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        printed = process.stdout.read()
    eventually(lambda: not is_running(int(part)))
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    parts = {part["part"]: part for part in json.loads(file.read_text())["parts"]}
    assert len(findings(parts["environment"])) > 2
    if number == signal.SIGTERM:
        assert list(parts) == ["environment", "kernels"]
        assert findings(parts["kernels"])[0]["what"] == "copy bandwidth"
        assert parts["kernels"]["failure"] == "ended by SIGTERM"
        assert "FAILED: ended by SIGTERM" in printed


def test_parts_fit_the_time_of_a_visit_each_has_a_row_and_http_is_held_against_offline_in_either_order() -> None:
    """All in one process, which takes five seconds to import it all."""
    subprocess.run([sys.executable, "-c", PARTS_AND_RATES], cwd=ROOT, check=True)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_part_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    status, printed, parts = check(tmp_path, "--apart", "--parts", "kernels", "environment", "--seconds", "1.5")
    assert status == 1
    assert "took longer than" in str(parts["kernels"]["failure"])
    assert parts["environment"]["failure"] == "no time was left"
    assert "FAILED" in printed


@pytest.mark.nightly
def test_a_part_that_crashes_is_told_with_the_end_of_its_errors() -> None:
    subprocess.run([sys.executable, "-c", CRASHED], cwd=ROOT, check=True)


@pytest.mark.nightly  # for every change lint-imports says that backend needs none of them
def test_the_engine_imports_on_a_machine_without_the_gateways_packages() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(NOT_ON_A_BARE_MACHINE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
