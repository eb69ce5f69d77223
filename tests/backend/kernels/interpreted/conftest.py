"""Triton kernels in Triton's interpreter, chosen when Triton is imported: `test_triton_ops.py` runs this folder."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory: None) -> None:
    """Every test here has it."""
