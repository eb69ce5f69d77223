"""Root-mean-square normalisation of rows, with or without adding to a residual first."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(out, x, residual, weight, eps, ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row. Sums and products are rounded to the rows' type where the reference rounds them."""
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(x + places, mask=real, other=0.0)
    dtype = row.dtype
    scales = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        held = tl.load(residual + places, mask=real, other=0.0)
        row = (held.to(tl.float32) + row.to(tl.float32)).to(dtype)
        tl.store(residual + places, row, mask=real)
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out + places, (wide.to(dtype).to(tl.float32) * scales).to(dtype), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`; `x` is contiguous, of up to 65,536 columns."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`: `residual` takes the sum."""
    assert residual.is_contiguous()
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](
        *(out, x, x if residual is None else residual, weight, eps),
        ADDS=residual is not None,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
