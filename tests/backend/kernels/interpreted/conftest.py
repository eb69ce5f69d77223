"""Triton kernels in Triton's interpreter, chosen when Triton is imported: `test_triton.py` runs this folder."""

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that whatever a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
