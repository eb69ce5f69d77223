"""Products on a GPU with weights of 4 and 8 bits, which are read packed and dequantised in registers.

A weight's number is `integer * scale + minimum` in fp32, rounded to the type of the inputs, or an e4m3 number; products
are added in fp32. The scale of e4m3 numbers is their output's, and multiplies its sum. Weights are the left operand of
the dot: Hopper takes that from registers, and decodes pad no tile of theirs.

Memory is ordered by blocks of `BLOCK_BYTES` bytes of each output, so that a tile's loads are contiguous. Of 4 bits the
low halves of a block's bytes are its first `BLOCK_BYTES` inputs, the high halves the others.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from backend.kernels.integers import IntegerWeight
from backend.kernels.triton_lang import FP8, capability, dot, from_cache, kernel_view, shared_memory

BLOCK_BYTES = 128  # of an output, which an iteration reads
OUTPUT_MULTIPLE = 128  # to which outputs are filled up: of every tile's
LARGEST_E4M3 = 448.0
LARGE_SHARED_MEMORY = 160 << 10  # bytes, with which tiles are larger and more stages are in flight


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] as the kernel reads it, with outputs filled up to whole tiles and inputs to blocks."""

    outputs: int
    bits: int  # 4: integers from 0 to 15; 8
    group: int  # inputs of an output that share a scale; 0: all do, and the numbers are e4m3
    blocks: Tensor  # [blocks, outputs, BLOCK_BYTES] int8; uint8 of 4 bits; e4m3
    scales: Tensor  # [blocks, outputs, groups of a block] fp16; of e4m3 [outputs] fp32
    minima: Tensor | None  # as `scales`

    @classmethod
    def of_integers(cls, weight: IntegerWeight) -> "PackedWeight":
        """Pack integers. The factors of a block and its groups' steps become one factor for each group, in fp16.

        Raises ValueError for groups that do not divide a block's inputs.
        """
        outputs, bits, group = len(weight), weight.bits, weight.group
        if BLOCK_BYTES % group:
            raise ValueError(f"groups of {group} inputs are not packed: {BLOCK_BYTES} inputs are whole groups")
        factors = weight.spread_factors().half()
        scales, minima, integers = factors[:, :, 0], None, weight.integers
        if factors.shape[2] == 2:
            minima = factors[:, :, 1]
        elif bits == 4:  # from -8 to 7
            minima, integers = -8 * scales, integers + 8
        of_block = BLOCK_BYTES * 8 // bits
        data = _blocks(integers, of_block)
        if bits == 4:
            low, high = data.view(torch.uint8).chunk(2, 2)
            data = low | high << 4
        in_block = of_block // group
        return cls(
            outputs,
            bits,
            group,
            data.contiguous(),
            _blocks(scales, in_block).contiguous(),
            None if minima is None else _blocks(minima, in_block).contiguous(),
        )

    @classmethod
    def rounded_to_e4m3(cls, weight: Tensor) -> "PackedWeight":
        """Round `weight` [outputs, inputs] to e4m3; the largest of an output becomes 448."""
        wide = weight.float()
        scales = wide.abs().amax(1) / LARGEST_E4M3
        numbers = torch.where(scales[:, None] > 0, wide / scales[:, None], 0.0).to(FP8)
        data = _blocks(numbers.view(torch.uint8), BLOCK_BYTES).contiguous()
        return cls(len(weight), 8, 0, data.view(FP8), functional.pad(scales, (0, -len(weight) % OUTPUT_MULTIPLE)), None)

    def to(self, device: torch.device | None) -> "PackedWeight":
        """Return the weight in the memory of `device`; None: where it is."""
        minima = None if self.minima is None else self.minima.to(device=device)
        return replace(self, blocks=self.blocks.to(device=device), scales=self.scales.to(device=device), minima=minima)

    def dequantised(self) -> Tensor:
        """Return the numbers [outputs, inputs filled up] in fp32: what the kernel multiplies with, before rounding."""
        if self.group == 0:
            wide = self.blocks.float() * self.scales[:, None]
        else:
            data = torch.cat((self.blocks & 15, self.blocks >> 4), 2) if self.bits == 4 else self.blocks
            each = data.float().view(*data.shape[:2], -1, self.group) * self.scales.float().unsqueeze(3)
            wide = (each if self.minima is None else each + self.minima.float().unsqueeze(3)).view(data.shape)
        return wide.transpose(0, 1).flatten(1)[: self.outputs]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.blocks, self.scales, self.minima) if part is not None)


def _blocks(rows: Tensor, of_block: int) -> Tensor:
    """Return [blocks, outputs, of_block] of rows [outputs, columns], filled up with zeros."""
    outputs, columns = rows.shape
    whole = functional.pad(rows, (0, -columns % of_block, 0, -outputs % OUTPUT_MULTIPLE))
    return whole.view(whole.shape[0], -1, of_block).transpose(0, 1)


@triton.jit
def _add(
    acc,  # [BLOCK_N, BLOCK_M]
    numbers,  # [BLOCK_N, DEPTH], as they are stored
    x,  # [BLOCK_M] pointers to the inputs of rows
    is_row,
    first,  # of the inputs
    inputs,
    scales,  # [BLOCK_N] pointers to those of the outputs' numbers
    minima,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Return the sums with the products of some inputs."""
    DEPTH: tl.constexpr = numbers.shape[1]
    dtype: tl.constexpr = x.dtype.element_ty
    places = first + tl.arange(0, DEPTH)
    held = tl.broadcast_to(is_row[None, :], [DEPTH, acc.shape[1]])
    if not IS_EVEN:
        held &= places[:, None] < inputs
    part = tl.load(x[None, :] + places[:, None], mask=held, other=0.0)
    if GROUP == 0:
        wide = from_cache(numbers, dtype)
    else:
        GROUPS: tl.constexpr = DEPTH // GROUP if GROUP < DEPTH else 1
        groups = tl.arange(0, GROUPS)
        scale = tl.load(scales[:, None] + groups[None, :]).to(tl.float32)
        each = tl.reshape(numbers.to(tl.float32), [acc.shape[0], GROUPS, DEPTH // GROUPS]) * scale[:, :, None]
        if HAS_MINIMUM:
            each += tl.load(minima[:, None] + groups[None, :]).to(tl.float32)[:, :, None]
        wide = tl.reshape(each, [acc.shape[0], DEPTH]).to(dtype)
    return dot(wide, part, acc)


@triton.jit(do_not_specialize=["num_rows"])
def _packed_product(
    out,  # [num_rows, outputs], rows `out_stride` apart
    x,  # [num_rows, inputs]
    blocks,  # [num_blocks, padded, BLOCK_BYTES]
    scales,
    minima,  # if HAS_MINIMUM
    bias,  # [outputs], if BIASED
    num_rows,
    outputs,
    padded,
    inputs,
    num_blocks,
    out_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    BIASED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute the results of some rows and outputs."""
    TURNS: tl.constexpr = BLOCK // DEPTH
    PARTS: tl.constexpr = 8 // BITS
    GROUPS: tl.constexpr = BLOCK // GROUP if GROUP else 1
    of_outputs = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    of_rows = x + rows.to(tl.int64) * inputs
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(num_blocks * TURNS):
        block, start = turn // TURNS, turn % TURNS * DEPTH
        lines = block * padded + of_outputs
        data = tl.load(blocks + lines[:, None] * BLOCK + start + tl.arange(0, DEPTH)[None, :])
        first, groups = block * PARTS * BLOCK + start, lines * PARTS * GROUPS
        if GROUP:
            groups += start // GROUP
        near, least = scales + groups, minima + groups
        if BITS == 4:
            low, high = data & 15, data >> 4
            acc = _add(acc, low, of_rows, is_row, first, inputs, near, least, GROUP, HAS_MINIMUM, IS_EVEN)
            first, near, least = first + BLOCK, near + GROUPS, least + GROUPS
            acc = _add(acc, high, of_rows, is_row, first, inputs, near, least, GROUP, HAS_MINIMUM, IS_EVEN)
        else:
            acc = _add(acc, data, of_rows, is_row, first, inputs, near, least, GROUP, HAS_MINIMUM, IS_EVEN)
    if GROUP == 0:
        acc *= tl.load(scales + of_outputs)[:, None]
    is_output = of_outputs < outputs
    if BIASED:
        acc += tl.load(bias + of_outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    results = out + rows.to(tl.int64)[None, :] * out_stride + of_outputs[:, None]
    tl.store(results, acc.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@dataclass(frozen=True, slots=True)
class PackedTile:
    """The rows and outputs that a program computes, and the bytes of each output that it reads at a time."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


def product_tile(num_rows: int, weight: PackedWeight, device: torch.device) -> PackedTile:
    """Return a tile. Up to 64 rows are one tile: each weight is read once."""
    is_large = shared_memory(capability(device)) >= LARGE_SHARED_MEMORY
    if num_rows <= 16:
        outputs, warps = (16, 1) if weight.outputs < 2048 else (32, 2)  # scales are copied in words of four bytes
        return PackedTile(16, outputs, BLOCK_BYTES, warps, stages=6 if is_large else 4)
    if num_rows <= 64:
        return PackedTile(triton.next_power_of_2(num_rows), 64, BLOCK_BYTES // 2, warps=4, stages=5 if is_large else 3)
    return PackedTile(128 if is_large else 64, 128, BLOCK_BYTES // 2, warps=8, stages=3)


def multiply(out: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    """Write `x @ weight.T + bias` to `out` [rows, outputs], which may be columns of a wider tensor."""
    (rows, inputs), (num_blocks, padded, block) = x.shape, weight.blocks.shape
    tile = product_tile(rows, weight, x.device)
    _packed_product[(triton.cdiv(weight.outputs, tile.outputs), triton.cdiv(rows, tile.rows))](
        out,
        x,
        kernel_view(weight.blocks),
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        x if bias is None else bias,
        rows,
        weight.outputs,
        padded,
        inputs,
        num_blocks,
        out.stride(0),
        BITS=weight.bits,
        GROUP=weight.group,
        HAS_MINIMUM=weight.minima is not None,
        BIASED=bias is not None,
        IS_EVEN=inputs % (block * 8 // weight.bits) == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK=block,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """`x @ weight.T + bias`, a `Linear`, of a weight whose outputs lie in parts, each in a form of its own."""

    parts: tuple[PackedWeight, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        out = x.new_empty((x.shape[0], sum(part.outputs for part in self.parts)))
        first = 0
        for part in self.parts:
            own = slice(first, first + part.outputs)
            multiply(out[:, own], x, part, None if self.bias is None else self.bias[own])
            first = own.stop
        return out
