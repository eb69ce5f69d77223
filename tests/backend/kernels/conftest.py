"""The compiled kernels, where there is a compiler."""

from collections.abc import Iterator

import pytest
import torch

from backend.kernels import build
from backend.kernels.cpu import CpuOps
from backend.kernels.ops import Ops
from backend.kernels.torch_ops import TorchOps


@pytest.fixture
def native() -> CpuOps:
    """Made anew for each test: what it says of itself, such as `batch_invariant`, depends on what it was asked."""
    library = build.load_library(wait=True)
    if library is None:
        pytest.skip("no C++ compiler")
    return CpuOps(library)


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return TorchOps() if request.param == "torch" else request.getfixturevalue("native")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that each element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
