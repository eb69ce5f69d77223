"""Triton kernels without a GPU: interpreted against the references; `tests/test_compile_kernels.py` compiles them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend.bound_process import bound
from backend.errors import ConfigError
from backend.kernels.cpu import select_ops

ROOT = Path(__file__).parents[3]

pytest.importorskip("triton")


def run(*command: str, **variables: str) -> str:
    """What `command` prints when run by this Python in the checkout; fails with it when the command does."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    bounded = bound([sys.executable, *command])
    result = subprocess.run(**bounded, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


INTERPRETED = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore:Conversion of an array:DeprecationWarning")
FOLDER = "tests/interpreted"


@pytest.mark.timeout(1800)
def test_kernels_are_the_references_in_the_interpreter() -> None:
    assert " passed" in run(*INTERPRETED, FOLDER, TRITON_INTERPRET="1")


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_kernels_are_the_references_in_the_interpreter_for_hundreds_of_shapes() -> None:
    assert " passed" in run(*INTERPRETED, "--all", FOLDER, TRITON_INTERPRET="1")


def test_nothing_imports_triton_unless_its_kernels_are_chosen() -> None:
    run("-c", "import sys, backend.llm; assert 'triton' not in sys.modules and 'triton.language' not in sys.modules")


def test_triton_kernels_are_refused_without_a_cuda_device() -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        select_ops(torch.device("cpu"), torch.float32, "triton")


def test_triton_kernels_are_the_default_of_a_cuda_device() -> None:
    assert type(select_ops(torch.device("cuda"), torch.bfloat16)).__name__ == "TritonOps"


def test_a_gpu_rounds_weights_where_it_is_asked_to() -> None:
    ops = select_ops(torch.device("cuda"), torch.bfloat16, quantization="int4")
    assert (type(ops).__name__, vars(ops)["_quantization"]) == ("TritonOps", "int4")


def test_a_missing_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "backend.kernels.triton_ops", raising=False)
    for name in ("triton", "backend.kernels.paged_decode"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="install it"):
        select_ops(torch.device("cuda"), torch.bfloat16)
