"""The compiled kernels, where there is a compiler."""

from collections.abc import Iterator
from ctypes import CDLL

import pytest
import torch

from backend.kernels import build
from backend.kernels.cpu import CpuOps
from backend.kernels.ops import Ops
from backend.kernels.torch_ops import TorchOps


@pytest.fixture(scope="session")
def _library() -> CDLL | None:
    return build.load_library(wait=True)


@pytest.fixture
def native(_library: CDLL | None) -> CpuOps:
    """Made anew for each test: what it says of itself, such as `batch_invariant`, depends on what it was asked."""
    if _library is None:
        pytest.skip("no C++ compiler")
    return CpuOps(_library)


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return TorchOps() if request.param == "torch" else request.getfixturevalue("native")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that each element that a kernel forgets to write shows."""
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` would load torch's compiler for it
    yield
    torch.set_deterministic_debug_mode("default")


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
