"""ggml's block formats number by number, as its description has them: the oracle of the tensors' multiplying out.

All arithmetic is float32, each product and sum rounded by itself.
"""

import struct
from collections.abc import Callable, Iterator

import numpy as np

from backend.gguf.reader import FORMATS
from tests.backend.gguf.files import TYPES

F = np.float32


def half(block: bytes, at: int) -> F:
    return F(struct.unpack_from("<e", block, at)[0])


def nibble(packed: bytes, index: int) -> int:
    """Of 2 n numbers in n bytes the first n are the low halves, in order."""
    return packed[index] & 15 if index < len(packed) else packed[index - len(packed)] >> 4


def q4_0(block: bytes) -> Iterator[F]:
    for index in range(32):
        yield half(block, 0) * F(nibble(block[2:], index) - 8)


def q4_1(block: bytes) -> Iterator[F]:
    for index in range(32):
        yield half(block, 0) * F(nibble(block[4:], index)) + half(block, 2)


def fifth(block: bytes, at: int, index: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> index & 1) << 4


def q5_0(block: bytes) -> Iterator[F]:
    for index in range(32):
        yield half(block, 0) * F((nibble(block[6:], index) | fifth(block, 2, index)) - 16)


def q5_1(block: bytes) -> Iterator[F]:
    for index in range(32):
        yield half(block, 0) * F(nibble(block[8:], index) | fifth(block, 4, index)) + half(block, 2)


def q8_0(block: bytes) -> Iterator[F]:
    for index in range(32):
        yield half(block, 0) * F(struct.unpack_from("b", block, 2 + index)[0])


def six_bits(packed: bytes, index: int) -> tuple[int, int]:
    """The scale and the minimum of a part of 32 numbers, 0 to 7, as ggml's get_scale_min_k4 reads them."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    scale = (packed[index + 4] & 15) | ((packed[index - 4] >> 6) << 4)
    return scale, (packed[index + 4] >> 4) | ((packed[index] >> 6) << 4)


def q4_k(block: bytes) -> Iterator[F]:
    for index in range(256):
        part, within = divmod(index, 32)
        scale, least = six_bits(block[4:16], part)
        byte = block[16 + part // 2 * 32 + within]
        number = byte >> 4 if part % 2 else byte & 15
        yield half(block, 0) * F(scale) * F(number) - half(block, 2) * F(least)


def q5_k(block: bytes) -> Iterator[F]:
    for index in range(256):
        part, within = divmod(index, 32)
        scale, least = six_bits(block[4:16], part)
        byte = block[48 + part // 2 * 32 + within]
        number = (byte >> 4 if part % 2 else byte & 15) + (16 if block[16 + within] >> part & 1 else 0)
        yield half(block, 0) * F(scale) * F(number) - half(block, 2) * F(least)


def q6_k(block: bytes) -> Iterator[F]:
    for index in range(256):
        big, rest = divmod(index, 128)
        part, within = divmod(rest, 32)
        byte = block[big * 64 + part % 2 * 32 + within]
        low = byte >> 4 if part >= 2 else byte & 15
        high = block[128 + big * 32 + within] >> (2 * part) & 3
        scale = struct.unpack_from("b", block, 192 + index // 16)[0]
        yield half(block, 208) * F(scale) * F((low | high << 4) - 32)


_NUMBERS: dict[str, Callable[[bytes], Iterator[F]]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
KINDS = [*_NUMBERS]


def numbers(kind: str, data: bytes) -> np.ndarray:
    size = FORMATS[TYPES[kind]].num_bytes
    blocks = [data[at : at + size] for at in range(0, len(data), size)]
    return np.array([number for block in blocks for number in _NUMBERS[kind](block)], np.float32)
