"""Products with packed weights: beside their definition, beside cuBLAS' in 16 bits, and beside the bytes they read."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from backend.kernels.integers import rounded
from backend.kernels.packed_product import PackedProduct, PackedWeight
from backend.kernels.self_check import TOLERANCE
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.kernels_gpu import best_seconds, peaks_of, turns

LLAMA_3_8B_PRODUCTS = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))  # outputs and inputs of a layer
SMALL_PRODUCTS = ((130, 300), (40, 96))
ROWS, SMALL_ROWS = (1, 16, 64, 512), (1, 17)
BITS = {"int4": 4, "int8": 8, "fp8": 0}
LEAST_SPEEDUP = {("int4", 1): 2.0, ("int4", 16): 2.0} | {("fp8", rows): 1.5 for rows in (1, 16, 64)}


def check(device: torch.device) -> Iterator[Finding]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float16  # an interpreter truncates to bfloat16
    products, every = (LLAMA_3_8B_PRODUCTS, ROWS) if on_gpu else (SMALL_PRODUCTS, SMALL_ROWS)
    bandwidth = peaks_of(device, dtype).bandwidth
    for kind in BITS:
        errors = [largest_error(kind, shape, rows, dtype, device) for shape in products for rows in every]
        yield Finding(f"products in {kind}, error", max(errors), bound=TOLERANCE[dtype], exact=True)
    for rows in every:
        plain = sum(seconds_of(None, shape, rows, dtype, device)[0] for shape in products)
        yield Finding(f"a layer's products, {rows} rows, 16 bits", plain * 1e6, "us")
        for kind in BITS:
            found = [seconds_of(kind, shape, rows, dtype, device) for shape in products]
            seconds, num_bytes = (sum(column) for column in zip(*found, strict=True))
            what = f"a layer's products, {rows} rows, {kind}"
            yield Finding(what, seconds * 1e6, "us")
            least = LEAST_SPEEDUP.get((kind, rows))
            yield Finding(f"{what}: 16 bits / time", plain / seconds, bound=least, sense=">=")
            yield Finding(f"{what}: bytes at a copy's rate / time", num_bytes / bandwidth / seconds)


def packed(kind: str, weight: Tensor) -> PackedWeight:
    return PackedWeight.of_integers(rounded(weight, BITS[kind])) if BITS[kind] else PackedWeight.rounded_to_e4m3(weight)


def largest_error(kind: str, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of a product, relative to the largest result in fp32 of the numbers that the weight means."""
    weight, x = drawn(shape, dtype, device), drawn((rows, shape[1]), dtype, device)
    own = packed(kind, weight)
    expected = x.float() @ own.dequantised()[:, : shape[1]].T
    found = PackedProduct((own,), None)(x).float()
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


def seconds_of(
    kind: str | None, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, int]:
    """Return the time of a product, its weight out of the caches, and the bytes of its weight; None: in 16 bits."""
    weight, x = drawn(shape, dtype, device), drawn((rows, shape[1]), dtype, device)
    if kind is None:
        weights = cycle([weight.clone() for _ in range(turns(weight.nbytes))])
        call = lambda: torch.nn.functional.linear(x, next(weights))  # noqa: E731
        return best_seconds(call, device, turns(weight.nbytes)), weight.nbytes
    own = packed(kind, weight)
    copies = [replace(own, blocks=own.blocks.clone()) for _ in range(turns(own.num_bytes))]
    products = cycle([PackedProduct((one,), None) for one in copies])
    return best_seconds(lambda: next(products)(x), device, len(copies)), own.num_bytes


def launch_all() -> None:
    """Launch what `check` launches on a GPU, on tensors without memory."""
    for shape in LLAMA_3_8B_PRODUCTS:
        for kind in BITS:
            product = PackedProduct((packed(kind, torch.empty(shape, dtype=torch.bfloat16, device="meta")),), None)
            for rows in ROWS:
                product(torch.empty((rows, shape[1]), dtype=torch.bfloat16, device="meta"))


def drawn(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) / math.sqrt(shape[1])).to(dtype)
