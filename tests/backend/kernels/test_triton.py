"""Triton kernels without a GPU: interpreted against the references, and compiled for the GPUs they are meant for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend.errors import ConfigError
from backend.kernels.cpu import select_ops

ROOT = Path(__file__).parents[3]

pytest.importorskip("triton")


def run(*command: str, **variables: str) -> str:
    """What `command` prints when run by this Python in the checkout; fails with it when the command does."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(400)
def test_kernels_are_the_references_in_the_interpreter() -> None:
    folder = "tests/backend/kernels/interpreted"
    of_triton_36 = ("-W", "ignore:Conversion of an array:DeprecationWarning")
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", *of_triton_36, folder, TRITON_INTERPRET="1")


def compiled(folder: Path, *options: str) -> str:
    """What is told of kernels compiled in a process, into `folder`."""
    return run("scripts/compile_kernels.py", "--jobs", "1", *options, TRITON_CACHE_DIR=str(folder))


SERVING = ("--dtype", "bfloat16", "--head-dim", "128", "--block-size", "16")


@pytest.mark.timeout(900)
def test_attention_is_compiled_for_every_gpu_without_faults(tmp_path: Path) -> None:
    """No spills; shared memory that is there; tensor cores; wide copies, in flight from one iteration to the next."""
    printed = compiled(tmp_path, *SERVING, "--kernel", "prefill", "decode")
    assert "no kernel has a fault" in printed
    assert printed.count("prefill") == printed.count("decode") == 6


@pytest.mark.timeout(900)
def test_other_kernels_and_shapes_are_compiled_without_faults(tmp_path: Path) -> None:
    rest = ("decode", "join", "prefill windowed", "rope_and_store normed", "rms_norm adds", "silu_mul")
    sampling = ("survey penalises filters", "count 0 20", "count 1 0", "weigh", "choose penalises filters")
    assert "no kernel has a fault" in compiled(tmp_path, *SERVING, "--arch", "90", "--kernel", *rest, *sampling)
    small = ("--dtype", "fp8", "--head-dim", "64", "--block-size", "16", "--group", "7", "--arch", "89")
    assert "no kernel has a fault" in compiled(tmp_path, *small, "--kernel", "prefill", "decode")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", ["1", "4", "7", "8"])
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
def test_every_kernel_is_compiled_without_faults(arch: str, group: str, tmp_path: Path) -> None:
    assert "no kernel has a fault" in compiled(tmp_path, "--arch", arch, "--group", group)


def test_nothing_imports_triton_unless_its_kernels_are_chosen() -> None:
    run("-c", "import sys, backend.llm; assert 'triton' not in sys.modules and 'triton.language' not in sys.modules")


def test_triton_kernels_are_refused_without_a_cuda_device() -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        select_ops(torch.device("cpu"), torch.float32, "triton")


def test_triton_kernels_are_the_default_of_a_cuda_device() -> None:
    assert type(select_ops(torch.device("cuda"), torch.bfloat16)).__name__ == "TritonOps"


def test_a_missing_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "backend.kernels.triton_ops", raising=False)
    for name in ("triton", "backend.kernels.paged_decode"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="install it"):
        select_ops(torch.device("cuda"), torch.bfloat16)


@pytest.mark.timeout(400)
def test_the_benchmark_runs_in_the_interpreter(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    printed = run("-m", "benchmarks.kernels_gpu", "--json", str(figures), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert "every kernel agrees with the reference" in printed
    kernels = {found["kernel"] for found in json.loads(figures.read_text())["kernels"]}
    assert kernels >= {"decode attention", "prefill attention", "rope and store", "sampling, top-k and top-p"}


@pytest.mark.timeout(400)
def test_tiles_are_compared_in_the_interpreter(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run("-m", "benchmarks.attention_tiles", "--json", str(figures), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    found = json.loads(figures.read_text())
    assert [way["way"] for way in found[::2]] == ["as it is"] * 2
    assert all(len(way["fractions"]) == 1 for way in found)
