"""The memory of the pool on a CPU."""

import re
from pathlib import Path

import pytest
import torch

from backend.paged_kv.kv_cache import KVCache
from tests.backend.runners import MODEL

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([^\n]*)", re.MULTILINE | re.DOTALL)


def test_the_pool_of_a_cpu_is_memory_that_has_huge_pages_where_a_kernel_has_them() -> None:
    """By default none has them for shared memory, whatever is advised."""
    kv = KVCache(MODEL, 64, 16, torch.float32, torch.device("cpu"))
    address, mappings = kv.blocks.data_ptr(), _MAPPING.findall(Path("/proc/self/smaps").read_text())
    if not mappings or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel does not tell")
    flags = next(flags.split() for begin, end, flags in mappings if int(begin, 16) <= address < int(end, 16))
    assert "hg" in flags, "huge pages are advised"
    assert "sh" not in flags
