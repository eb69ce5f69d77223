"""Numbers of GGUF's block formats, as float32: products and sums are rounded one by one, as in ggml's reference.

Each function takes blocks of bytes [blocks, bytes of a block] and returns their numbers [blocks, numbers of a block].
Low nibbles are the first half of the numbers that share their bytes, high nibbles the second.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from backend.gguf.reader import GgufFile, StoredTensor

NUMBERS_AT_ONCE = 2**20  # so that intermediate values stay in caches


def dequantised(file: GgufFile, tensor: StoredTensor) -> Tensor:
    """Return a tensor's numbers, of a quantised tensor in float32."""
    stored, size = tensor.format, prod(tensor.shape)
    if stored.size == 1:
        data = file.read(tensor.start, tensor.num_bytes)
        return torch.frombuffer(data, dtype=_PLAIN[stored.name]).view(tensor.shape)
    blocks, step = size // stored.size, max(1, NUMBERS_AT_ONCE // stored.size)
    numbers = torch.empty(blocks, stored.size)
    for first in range(0, blocks, step):
        some = min(step, blocks - first)
        data = file.read(tensor.start + first * stored.num_bytes, some * stored.num_bytes)
        numbers[first : first + some] = _BLOCKS[stored.name](
            torch.frombuffer(data, dtype=torch.uint8).view(some, stored.num_bytes)
        )
    return numbers.view(tensor.shape)


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Return the float16 numbers from byte `first` of each block on: [blocks, count]."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low nibbles of the last dimension's bytes, then the high ones: [..., 2 * bytes]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, count: int) -> Tensor:
    """Return the groups of `count` bits of each byte, lowest first: [..., 8 / count, bytes]."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8).view(-1, 1)
    bits: Tensor = (packed.unsqueeze(-2) >> shifts) & (2**count - 1)
    return bits


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """Return the fifth bit of each of 32 numbers, from 4 bytes in order, at its value: 16."""
    return _bits(blocks[:, first : first + 4], 1).transpose(1, 2).reshape(-1, 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float() + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum of each 32 of 256 numbers: [blocks, 8, 1].

    They are products of the block's two (bytes 0 to 3) and of 6-bit numbers in bytes 4 to 15: four scales and four
    minima in the low bits of eight bytes, four more of each in the nibbles of the last four, with their two highest
    bits in the eight's.
    """
    low_scales, low_minima, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low_scales & 63, (rest & 15) | (low_scales >> 6 << 4)), dim=1)
    minima = torch.cat((low_minima & 63, (rest >> 4) | (low_minima >> 6 << 4)), dim=1)
    both = _halves(blocks, 0, 2)
    return (both[:, :1] * scales).unsqueeze(-1), (both[:, 1:] * minima).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    numbers = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return (scales * numbers - minima).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = _bits(blocks[:, 16:48], 1) << 4  # [blocks, 8, 32]
    return (scales * (low | high) - minima).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 256)
    high = _bits(blocks[:, 128:192].view(-1, 2, 32), 2).reshape(-1, 256) << 4
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    numbers = ((low | high).float() - 32).view(-1, 16, 16)
    return (scales.unsqueeze(-1) * numbers).view(-1, 256)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
