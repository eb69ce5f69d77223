"""Triton kernels in its interpreter, chosen when Triton is imported: tests of `triton_ops` run this folder."""

import os

import pytest

from tests.backend.kernels.conftest import poisoned_memory

__all__ = ["poisoned_memory"]

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory: None) -> None:
    """Give every test here memory that holds NaN."""
