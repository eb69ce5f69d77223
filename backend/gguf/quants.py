"""GGUF's block formats: their integers, scales and minima, and their numbers in float32 as in ggml's reference.

Each function takes blocks of bytes [blocks, bytes of a block] and returns their integers [blocks, numbers of a block].
Low nibbles are the first half of the numbers that share their bytes, high nibbles the second.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from backend.gguf.reader import FORMATS, GgufFile, StoredTensor
from backend.kernels.integers import IntegerWeight

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
        bytes_of_blocks = torch.frombuffer(data, dtype=torch.uint8).view(some, stored.num_bytes)
        numbers[first : first + some] = _INTEGERS[stored.name](bytes_of_blocks).dequantised()
    return numbers.view(tensor.shape)


def stored_rows(file: GgufFile, tensor: StoredTensor) -> Tensor:
    """Return the bytes of a quantised matrix's rows: [rows, bytes of a row]."""
    return torch.frombuffer(file.read(tensor.start, tensor.num_bytes), dtype=torch.uint8).view(tensor.shape[0], -1)


def integers(name: str, rows: Tensor) -> IntegerWeight:
    """Return rows of the format `name`, [rows, bytes of a row], as a weight."""
    outputs, blocks = len(rows), rows.shape[1] // _BLOCK_BYTES[name]
    found = _INTEGERS[name](rows.reshape(outputs * blocks, -1))
    return IntegerWeight(
        found.bits,
        found.integers.reshape(outputs, -1),
        found.factors.reshape(outputs, blocks, -1),
        None if found.steps is None else found.steps.reshape(outputs, -1, found.factors.shape[2]),
    )


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Return the float16 numbers from byte `first` of each block on: [blocks, 1, count]."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).unsqueeze(1)


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


def _q4_0(blocks: Tensor) -> IntegerWeight:
    return _weight(4, _nibbles(blocks[:, 2:]), _halves(blocks, 0), less=8)


def _q4_1(blocks: Tensor) -> IntegerWeight:
    return _weight(4, _nibbles(blocks[:, 4:]), _halves(blocks, 0, 2))


def _q5_0(blocks: Tensor) -> IntegerWeight:
    return _weight(8, _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), _halves(blocks, 0), less=16)


def _q5_1(blocks: Tensor) -> IntegerWeight:
    return _weight(8, _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0, 2))


def _q8_0(blocks: Tensor) -> IntegerWeight:
    return _weight(8, blocks[:, 2:].view(torch.int8), _halves(blocks, 0))


def _weight(bits: int, numbers: Tensor, factors: Tensor, steps: Tensor | None = None, less: int = 0) -> IntegerWeight:
    return IntegerWeight(bits, numbers.view(torch.int8) - less, factors, steps)


def _steps(blocks: Tensor) -> Tensor:
    """Return what the scale and the minimum of 256 numbers are multiplied by for each 32 of them: [blocks, 8, 2].

    They are 6-bit numbers in bytes 4 to 15, and minima are subtracted: four scales and four minima in the low bits of
    eight bytes, four more of each in the nibbles of the last four, with their two highest bits in the eight's.
    """
    low_scales, low_minima, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low_scales & 63, (rest & 15) | (low_scales >> 6 << 4)), dim=1)
    minima = torch.cat((low_minima & 63, (rest >> 4) | (low_minima >> 6 << 4)), dim=1)
    return torch.stack((scales.view(torch.int8), -minima.view(torch.int8)), dim=2)


def _q4_k(blocks: Tensor) -> IntegerWeight:
    numbers = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 256)
    return _weight(4, numbers, _halves(blocks, 0, 2), _steps(blocks))


def _q5_k(blocks: Tensor) -> IntegerWeight:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = _bits(blocks[:, 16:48], 1) << 4  # [blocks, 8, 32]
    return _weight(8, (low | high).view(-1, 256), _halves(blocks, 0, 2), _steps(blocks))


def _q6_k(blocks: Tensor) -> IntegerWeight:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 256)
    high = _bits(blocks[:, 128:192].view(-1, 2, 32), 2).reshape(-1, 256) << 4
    steps = blocks[:, 192:208].view(torch.int8).unsqueeze(2)
    return _weight(8, low | high, _halves(blocks, 208), steps, less=32)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS: dict[str, Callable[[Tensor], IntegerWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_BLOCK_BYTES = {one.name: one.num_bytes for one in FORMATS.values()}
