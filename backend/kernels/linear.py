"""The fastest of torch's matrix products for a weight that never changes.

On a CPU, oneDNN's packed weights are 2 to 2.8 times faster than `F.linear` in fp32 at 4 to 256 rows and 1.1 to 2.2
times in bf16 (Zen 5, one thread). Their operators are private to torch, so they are tried on first use.

oneDNN compiles a kernel for each number of rows and keeps a thousand of them: half a millisecond and half a megabyte
each. So rows are taken in tiles of few heights, whose kernels are compiled when a weight is taken over.
"""

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional

from backend.kernels import reference
from backend.kernels.ops import Linear

log = logging.getLogger(__name__)

HEIGHTS = (*range(1, 17), *range(20, 65, 4), 96, 128, 192, 256, 384, 512)
"""The heights that a tile may have, in rows. Up to 64 rows fit one tile with at most 3 of padding; more rows are cut
into several tiles.
"""

TILE_BYTES = 64 << 20  # the most bytes of a tile's result: a large vocabulary has low tiles

# numbers that are compared of one-row products, by bytes of one: of bfloat16 one in 50,000 may differ, of fp32 most
SINGLE_ROW_NUMBERS = {2: 1 << 18, 4: 1 << 12}

MIN_TILED_OUTPUTS = 16  # of a product in bfloat16: fewer show so seldom how they add that it takes seconds to see

_ONE_TILE_ROWS = 64
_LOW_TILE_ROWS = 16  # without a tile as low as this one, a decode would be mostly padding
_PROBE_SHAPE = (24, 40)
_agreeing: dict[tuple[object, ...], tuple[int, ...]] = {}  # by shape, the heights whose kernels add in one order


def best_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Take over `weight` [out_features, in_features]; see `Ops.linear`.

    A CPU that does not multiply in fp16 gets the weight widened to fp32: twice the memory, up to ten times the speed.
    One in bfloat16 of few outputs is widened too.
    """
    if weight.device.type != "cpu":
        return reference.linear(weight, bias)
    is_narrow = weight.dtype == torch.bfloat16 and len(weight) < MIN_TILED_OUTPUTS
    if packs(weight.dtype) and not is_narrow:
        return TiledLinear(weight, bias)
    if (weight.dtype == torch.float16 or is_narrow) and packs(torch.float32):
        return widened(TiledLinear(weight.float(), None if bias is None else bias.float()))
    return reference.linear(weight, bias)


class TiledLinear:
    """oneDNN's packed product, in tiles whose kernels are compiled when it is made: a call compiles nothing.

    `batch_invariant`: a row's result has the same bits in tiles of every height that is used, at any place in them. A
    height whose kernel adds in another order than the highest tile's is not used, unless no low one is left.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._product = packed_linear(weight, bias)
        row_bytes = weight.shape[0] * weight.element_size()
        heights = tuple(rows for rows in HEIGHTS if rows == 1 or rows * row_bytes <= TILE_BYTES)
        key = (*weight.shape, weight.dtype, bias is None, torch.get_num_threads())
        if key not in _agreeing:
            _agreeing[key] = self._compile(heights, weight)
        self.batch_invariant = _agreeing[key][0] <= _LOW_TILE_ROWS
        self.heights = _agreeing[key] if self.batch_invariant else heights

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` for x [rows, in_features]."""
        rows = x.shape[0]
        heights = tiles(rows, self.heights)
        if heights == (rows,):
            return self._product(x)
        padded = functional.pad(x, (0, 0, 0, sum(heights) - rows))
        if len(heights) == 1:
            return self._product(padded)[:rows]
        return torch.cat([self._product(part) for part in padded.split(heights)])[:rows]

    def _compile(self, heights: tuple[int, ...], weight: Tensor) -> tuple[int, ...]:
        """Run a tile of every height; returns the heights in which rows have the same bits as in the highest, at either
        end. Single rows, which have a kernel of their own, are compared more often: numbers rounded to 16 bits seldom
        show the order in which they were added.
        """
        highest, left = heights[-1], -(-SINGLE_ROW_NUMBERS[weight.element_size()] // weight.shape[0])
        generator, varying = torch.Generator().manual_seed(0), set[int]()
        parts = [(rows, part) for rows in heights for part in (slice(rows), slice(highest - rows, highest))]
        while parts:
            x = torch.randn((highest, weight.shape[1]), generator=generator).to(weight.dtype)
            expected = self._product(x)
            varying |= {rows for rows, part in parts if not torch.equal(self._product(x[part]), expected[part])}
            parts = [] if 1 in varying else [(1, slice(row, row + 1)) for row in range(min(highest, left))]
            left -= len(parts)
        return tuple(rows for rows in heights if rows not in varying)


@functools.lru_cache(maxsize=4096)
def tiles(rows: int, heights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the heights of tiles that hold `rows` rows together; the last may be higher than the rest of the rows."""
    found: list[int] = []
    while rows > min(_ONE_TILE_ROWS, heights[-1]):
        found.append(max(height for height in heights if height <= rows))
        rows -= found[-1]
    if rows or not found:
        found.append(min((height for height in heights if height >= rows > 0), default=0))
    return tuple(found)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def widened(linear: Linear) -> Linear:
    return lambda x: linear(x.float()).to(x.dtype)


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Return True if the packed product exists here for `dtype` and agrees with `F.linear`."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_PROBE_SHAPE, generator=generator).to(dtype)
    bias = torch.randn(_PROBE_SHAPE[0], generator=generator).to(dtype)
    x = torch.randn((5, _PROBE_SHAPE[1]), generator=generator).to(dtype)
    try:
        found = packed_linear(weight, bias)(x)
    except (AttributeError, RuntimeError, TypeError) as error:
        log.info("oneDNN packed linears are not available for %s: %s", dtype, str(error).splitlines()[0])
        return False
    expected = functional.linear(x.float(), weight.float(), bias.float())
    return found.dtype == dtype and torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2)
