"""Products of a few rows with a weight read the weight once, and these kernels leave little time between two reads.

A decode of few sequences takes as long as its weights take to be read, if no other work comes between two products. So
the work on a product's result is part of its kernel, which is launched while the kernel before it still runs. The norm
before a product is a kernel of its own, because every program would compute it (docs/decisions/gpu_kernels.md).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.layers import attention, feed_forward, run_layers
from backend.kernels.ops import DecoderStack, Linear, Ops, StepInputs
from backend.kernels.triton_lang import await_inputs, capability, dependent_launch, dot, gated, shared_memory

MAX_ROWS = 16
WIDTH_MULTIPLE = 64  # of a weight's rows: of two tiles, gates and their gated columns
MIN_DEPTH = 32  # of a tile
DEEP_PIPELINE_BYTES = 160 << 10  # of shared memory, with which more stages are in flight


@dataclass(frozen=True, slots=True)
class Product:
    """`x @ weight.T + bias`, a `Linear`: cuBLAS' product, whose parts the kernels of few rows take too."""

    weight: Tensor  # [out_features, in_features], contiguous
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The columns of the result that a program computes, and the numbers of each row that it reads at a time."""

    columns: int
    depth: int
    warps: int
    stages: int


def product_tile(width: int, depth: int, gates: bool, x: Tensor) -> ProductTile:
    """Return a tile: 16 KiB of a 16-bit weight a stage, or 8 in narrow products, so that there are more programs."""
    narrow = width < 2048 and not gates
    columns, warps = (16, 2) if narrow else (32, 4)
    if x.itemsize > 2:  # in three parts, which take more registers
        return ProductTile(16, min(64, _factor(depth)), warps=2, stages=4)
    stages = 4
    if shared_memory(capability(x.device)) >= DEEP_PIPELINE_BYTES:
        stages = 8 if narrow else 6
    return ProductTile(columns, min(128 if gates else 256, _factor(depth)), warps, stages)


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    out,  # [num_rows, WIDTH]; the residual if ADDS
    x,  # [num_rows, DEPTH]
    weight,  # [WIDTH, DEPTH]; [2 * WIDTH, DEPTH], gates first, if GATED
    bias,  # of the weight's rows
    num_rows,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some columns of the result. Numbers are rounded where the separate operations round them."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_K)
    first = weight + columns.to(tl.int64) * DEPTH
    second = first + WIDTH * DEPTH
    await_inputs(PDL)
    is_row = rows < num_rows
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        places = start + depth
        part = tl.load(x + rows[:, None] * DEPTH + places[None, :], mask=is_row[:, None], other=0.0)
        acc = dot(part, tl.load(first[None, :] + places[:, None]), acc)
        if GATED:
            up = dot(part, tl.load(second[None, :] + places[:, None]), up)
    dtype = out.dtype.element_ty
    if BIASED:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + WIDTH + columns).to(tl.float32)[None, :]
    result = acc.to(dtype)
    held = tl.broadcast_to(is_row[:, None], [BLOCK_M, BLOCK_N])
    results = out + rows[:, None] * WIDTH + columns[None, :]
    if GATED:
        result = gated(result, up.to(dtype))
    if ADDS:
        result = (tl.load(results, mask=held, other=0.0).to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(results, result, mask=held)


def multiply(out: Tensor, x: Tensor, product: Product, gates: bool = False, adds: bool = False) -> Tensor:
    """Write the product to `out`. `gates`: SiLU of its first half times the second; `adds`: it is added to `out`."""
    (rows, depth), width = x.shape, out.shape[1]
    tile = product_tile(width, depth, gates, x)
    _product[(width // tile.columns,)](
        out,
        x,
        product.weight,
        product.weight if product.bias is None else product.bias,
        rows,
        WIDTH=width,
        DEPTH=depth,
        GATED=gates,
        ADDS=adds,
        BIASED=product.bias is not None,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch(x.device),
    )
    return out


def _factor(number: int) -> int:
    """Return the largest power of two that divides `number`."""
    return number & -number


class FewRowLayers:
    """Layers that run steps of up to MAX_ROWS tokens, none with an adapter, by kernels of few rows, and others by the
    operations.
    """

    def __init__(self, ops: Ops, stack: DecoderStack) -> None:
        self._ops = ops
        self._stack = stack

    @classmethod
    def of(cls, ops: Ops, stack: DecoderStack) -> "FewRowLayers | None":
        """Return the layers; None if a weight has a shape that the kernels do not take."""
        products = [linear for layer in stack.layers for linear in layer.linears]
        has_plain_branches = not stack.gelu and all(layer.fed_norm is None for layer in stack.layers)
        return cls(ops, stack) if has_plain_branches and all(map(_takes, products)) else None

    def __call__(self, residual: Tensor, step: StepInputs, blocks: Tensor) -> Tensor:
        if residual.shape[0] > MAX_ROWS or step.adapters is not None:  # these add to a product before it is gated
            return run_layers(self._ops, self._stack, residual, step, blocks)
        for index, layer in enumerate(self._stack.layers):
            qkv, output, *products = map(_product_of, layer.linears)
            x = self._ops.rms_norm(residual, layer.input_norm, self._stack.eps)
            mixed = multiply(x.new_empty((x.shape[0], qkv.weight.shape[0])), x, qkv)
            attended = attention(self._ops, self._stack, index, mixed, step, blocks)
            multiply(residual, attended, output, adds=True)
            x = self._ops.rms_norm(residual, layer.post_attention_norm, self._stack.eps)
            if not products:
                residual += feed_forward(self._ops.silu_mul, layer.feed_forward, x)
                continue
            gate_up, down = products
            hidden = multiply(x.new_empty((x.shape[0], gate_up.weight.shape[0] // 2)), x, gate_up, gates=True)
            multiply(residual, hidden, down, adds=True)
        return self._ops.rms_norm(residual, self._stack.final_norm, self._stack.eps)


def _product_of(linear: Linear) -> Product:
    assert isinstance(linear, Product)
    return linear


def _takes(linear: Linear) -> bool:
    if not isinstance(linear, Product) or not linear.weight.is_contiguous():
        return False
    out_features, in_features = linear.weight.shape
    return out_features % WIDTH_MULTIPLE == 0 and _factor(in_features) >= MIN_DEPTH
