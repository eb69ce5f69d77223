"""The compiled kernels, where there is a compiler."""

import pytest

from backend.kernels import build
from backend.kernels.cpu import CpuOps


@pytest.fixture(scope="session")
def native() -> CpuOps:
    library = build.load_library(wait=True)
    if library is None:
        pytest.skip("no C++ compiler")
    return CpuOps(library)
