"""The rates that a device sustains, measured in some milliseconds at start: no table knows every processor."""

import time
from collections.abc import Callable

import torch

from backend.kernels import build
from backend.roofline import Peaks

MAX_READ_BYTES = 2**28  # of one read; smaller models are read as a whole, from the cache that holds them
MIN_READ_BYTES = 2**20
PRODUCT_SIZE = {"cpu": 768, "cuda": 4096}  # rows and columns of the two matrices
NUM_TRIES = 4  # of which the fastest counts: others on the machine only make it slower
RUNS_PER_TRY = {"cpu": 1, "cuda": 10}  # behind one another, so that launches cost a device no time


def measured_peaks(device: torch.device, dtype: torch.dtype, weight_bytes: int) -> Peaks | None:
    """Measure the bytes a second of reading as many bytes as the weights have, and the FLOP/s of a large product; None:
    the device has no memory left for it.
    """
    try:
        return _measured(device, dtype, weight_bytes)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(device: torch.device, dtype: torch.dtype, weight_bytes: int) -> Peaks:
    size = PRODUCT_SIZE[device.type]
    num_bytes = max(MIN_READ_BYTES, min(weight_bytes, MAX_READ_BYTES))
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    # drawn: a device may multiply equal numbers faster
    a, b = (torch.randn(size, size, dtype=_multiplied(device, dtype), device=device) for _ in range(2))
    bandwidth = num_bytes / _fastest(device, data.sum)
    flops = 2 * size**3 / _fastest(device, lambda: a @ b)
    return Peaks(bandwidth, flops, flops)


def _multiplied(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the device multiplies numbers of `dtype`: a CPU may widen them first."""
    narrow = device.type == "cpu" and not (dtype == torch.bfloat16 and build.multiplies_in_bfloat16())
    return torch.float32 if narrow else dtype


def _fastest(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of a run in the fastest try but the first, which may compile or allocate."""
    seconds, runs = [], RUNS_PER_TRY[device.type]
    for _ in range(1 + NUM_TRIES):
        began = time.perf_counter()
        for _ in range(runs):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / runs)
    return min(seconds[1:])
