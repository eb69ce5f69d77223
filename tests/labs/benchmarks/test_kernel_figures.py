"""Benchmarks of kernels run interpreted, and say what they measure."""

import json
from pathlib import Path

import pytest

from tests.backend.kernels.test_triton_ops import run

pytest.importorskip("triton")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_benchmark_runs_in_the_interpreter(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    printed = run(
        "-m", "labs.benchmarks.kernels_gpu", "--json", str(figures), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""
    )
    assert "every kernel agrees with the reference" in printed
    kernels = {found["kernel"] for found in json.loads(figures.read_text())["kernels"]}
    assert kernels >= {"decode attention", "prefill attention", "rope and store", "sampling, top-k and top-p"}
