"""Scenarios still run: each as its command, quickly, without a judgement."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from backend.bound_process import bound

ROOT = Path(__file__).parents[3]
SCENARIOS = (
    "agents", "batch_invariance", "cache_isolation", "claims", "classes", "connection_flood", "decision_cost",
    "device_idle", "engine_peers", "fairness", "fleet_fairness", "fleet_live", "flood", "front",
    "hostile_bodies", "hostile_schemas", "http_workers", "isolation", "log_cost", "long_prompt", "mixes", "overload",
    "overload_live", "pick", "plan_live", "policy_size", "preemption", "prefix_cache", "prices", "promises",
    "quota_store", "random_strategies", "routing", "routing_live", "row_counts", "speculation",
    "telemetry_cost", "tune", "tune_live", "what_if_live", "ceilings", "spare", "spare_live", "batch_kills",
    "embeddings", "noisy_peers",
)  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_is_a_command_with_the_flags_of_all(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        import_module(f"labs.benchmarks.{scenario}").main(["--help"])
    assert {"--runs", "--quick", "--results"} <= set(
        capsys.readouterr().out.replace("]", " ").replace("[", " ").split()
    )


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_quick_run_ends_well_and_writes_its_figures(scenario: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"labs.benchmarks.{scenario}", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(**bound(command), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / f"{scenario}.quick.json").read_text())
    assert all(rows for rows in results["tables"].values())
    assert results["targets"]
