"""The kernels' times against their floors, and the bound on decode attention."""

from collections.abc import Iterator

import torch

from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import dtype_of
from labs.benchmarks.kernels_gpu import Workload, measure_kernels, peaks_of

JUDGED = Workload(64, 1, 4096)


def check(device: torch.device) -> Iterator[Finding]:
    dtype = dtype_of(device)
    peaks = peaks_of(device, dtype)
    yield Finding("copy bandwidth", peaks.bandwidth / 1e12, "TB/s")
    yield Finding("matrix product", peaks.matrix_rate / 1e12, "TFLOP/s")
    for found in measure_kernels(device, dtype, peaks):
        what = f"{found.kernel}, {found.shape}, {found.workload}"
        yield Finding(what, found.seconds * 1e6, "us")
        bound = 0.85 if found.kernel == "decode attention" and found.workload == str(JUDGED) else None
        yield Finding(f"{what}: floor / time", found.fraction, bound=bound, sense=">=")
