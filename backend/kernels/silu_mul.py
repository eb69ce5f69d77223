"""The gated activation between the two products of an MLP."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul(out, gate_up, width, BLOCK: tl.constexpr):
    """One block of one row; rounded to the rows' type after the activation, as the reference rounds."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    places = gate_up + row * 2 * width + columns
    gate = tl.load(places, mask=real, other=0.0)
    up = tl.load(places + width, mask=real, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(gate.dtype), mask=real)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`; `gate_up` [T, 2 * intermediate] is contiguous."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    _silu_mul[rows, triton.cdiv(width, BLOCK)](out, gate_up, width, BLOCK=BLOCK, num_warps=4)
    return out
