"""Kernels by row: the root-mean-square norm, with or without an addition to the residual before, and SiLU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.triton_lang import await_inputs, dependent_launch, gated


@triton.jit
def _rms_norm(
    out, x, residual, weight, eps, ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Normalise one row. Sums and products are rounded to the rows' type where the reference rounds them."""
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    scales = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    await_inputs(PDL)
    row = tl.load(x + places, mask=real, other=0.0)
    dtype = row.dtype
    if ADDS:
        held = tl.load(residual + places, mask=real, other=0.0)
        row = (held.to(tl.float32) + row.to(tl.float32)).to(dtype)
        tl.store(residual + places, row, mask=real)
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out + places, (wide.to(dtype).to(tl.float32) * scales).to(dtype), mask=real)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the kernel of `reference.rms_norm`; `x` is contiguous, of up to 65,536 columns."""
    return _launch(x, None, weight, eps)


def launch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the kernel of `reference.add_rms_norm`, which adds to `residual` in place."""
    assert residual.is_contiguous()
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](
        out,
        x,
        x if residual is None else residual,
        weight,
        eps,
        ADDS=residual is not None,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(x.device),
    )
    return out


BLOCK = 1024


@triton.jit
def _silu_mul(out, gate_up, width, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    places = gate_up + row * 2 * width + columns
    await_inputs(PDL)
    gate = tl.load(places, mask=real, other=0.0)
    up = tl.load(places + width, mask=real, other=0.0)
    tl.store(out + row * width + columns, gated(gate, up, GELU), mask=real)


def launch_silu_mul(gate_up: Tensor) -> Tensor:
    """Launch the kernel of `reference.silu_mul`; `gate_up` [T, 2 * intermediate] is contiguous."""
    return _gate(gate_up, gelu=False)


def launch_gelu_mul(gate_up: Tensor) -> Tensor:
    """Launch the kernel of `reference.gelu_mul`, as that of `launch_silu_mul`."""
    return _gate(gate_up, gelu=True)


def _gate(gate_up: Tensor, gelu: bool) -> Tensor:
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    _silu_mul[rows, triton.cdiv(width, BLOCK)](
        out, gate_up, width, GELU=gelu, BLOCK=BLOCK, num_warps=4, **dependent_launch(out.device)
    )
    return out
