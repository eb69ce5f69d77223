"""Dequantised weights: each number is its stored integer or 8-bit float, less its zero point, times its scale."""

from collections.abc import Callable

import torch
from torch import Tensor

from backend.errors import ModelLoadError
from backend.model.quantization import WORD_BITS, QuantizedWeight, Scheme, scale_block
from backend.model.tensor_info import TensorInfo

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the neighbour that each four bits of a word hold, from the lowest
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_EXPONENT_BIAS = 127
Read = Callable[[TensorInfo], Tensor]


def dequantised(weight: QuantizedWeight, read: Read) -> Tensor:
    """Return the weight [rows, columns] in float32, or in MXFP4 [experts, columns, rows of one] in bfloat16, exactly.
    `read` returns a stored tensor. Raises `ModelLoadError` for a group that has no scale.
    """
    match weight.quantization.scheme:
        case Scheme.SCALED | Scheme.PACKED:
            return _scaled(weight, read)
        case Scheme.MXFP4:
            return _microscaled(weight, read)
        case _:
            return _grouped(weight, read)


def _microscaled(weight: QuantizedWeight, read: Read) -> Tensor:
    """Return numbers of one sign bit, two of the exponent and one of the fraction, the low half of a byte first."""
    pairs, scales = read(weight.stored), read(weight.parts["scales"])  # [experts, outputs, groups, 16], without the 16
    values = torch.empty((*pairs.shape[:3], 2 * pairs.shape[3]), dtype=torch.bfloat16)
    of_bits = torch.tensor(E2M1, dtype=torch.bfloat16)
    for expert, both, exponents in zip(values, pairs, scales, strict=True):  # one at a time: indices take much memory
        expert[:, :, ::2], expert[:, :, 1::2] = of_bits[(both & 15).int()], of_bits[(both >> 4).int()]
        expert.mul_(torch.exp2(exponents.float() - MXFP4_EXPONENT_BIAS).to(torch.bfloat16).unsqueeze(-1))
    return values.flatten(2).transpose(1, 2)


def _scaled(weight: QuantizedWeight, read: Read) -> Tensor:
    """Return a weight whose scales follow its rows: [rows or fewer, columns or fewer]."""
    parts, bits, is_packed = weight.parts, weight.quantization.bits, weight.quantization.scheme is Scheme.PACKED
    scale = parts.get("weight_scale") or parts["weight_scale_inv"]
    block = scale_block(weight, scale)
    assert block is not None, "it was checked when the header was read"
    numbers, offset = read(weight.stored), 1 << (bits - 1)
    if is_packed:
        numbers = _unpacked(numbers, bits)[:, : weight.columns] - offset
    values, zero = numbers.float(), parts.get("weight_zero_point")
    by_group = parts.get("weight_g_idx")
    groups = None if by_group is None else _groups(by_group, read, scale.shape[-1])
    scales = (*scale.shape, 1, 1)[:2]

    def spread(tensor: Tensor) -> Tensor:
        """Return a number for each weight, or a row or column of them."""
        tensor = tensor.float().reshape(scales)
        if groups is not None:
            return tensor[:, groups]
        if scales[1] > 1:
            tensor = tensor.repeat_interleave(block[1], 1)[:, : weight.columns]
        return tensor.repeat_interleave(block[0], 0)[: weight.rows] if 1 < scales[0] < weight.rows else tensor

    if zero is not None:
        points = read(zero)
        if is_packed:
            points = _unpacked(points.T.contiguous(), bits).T[: scales[0]] - offset
        values -= spread(points)
    return values.mul_(spread(read(scale)))


def _grouped(weight: QuantizedWeight, read: Read) -> Tensor:
    """Return a weight of GPTQ or AWQ, stored [columns, rows], with scales and zero points [groups, rows]."""
    parts, bits, scheme = weight.parts, weight.quantization.bits, weight.quantization.scheme
    scales, numbers, zeros = (read(part) for part in (parts["scales"], weight.stored, parts["qzeros"]))
    points = _unpacked(zeros, bits)
    if scheme is Scheme.AWQ:
        numbers, points = _in_order(_unpacked(numbers, bits)), _in_order(points)
    else:
        numbers = _unpacked(numbers.T.contiguous(), bits).T
        points = points + 1 if scheme is Scheme.GPTQ else points
    num_groups = scales.shape[0]
    if (index := parts.get("g_idx")) is not None:
        groups = _groups(index, read, num_groups)
    else:
        groups = torch.arange(weight.columns) // (weight.columns // num_groups)
    values = (numbers - points[groups]).float().mul_(scales.float()[groups])
    return values.T.contiguous()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers [n, m * 32 / bits] int32 of words [n, m], from the lowest bits up."""
    shifts = torch.arange(0, WORD_BITS - bits + 1, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _in_order(numbers: Tensor) -> Tensor:
    """Return AWQ's unpacked integers in the order of their columns."""
    ordered = torch.empty_like(numbers).view(numbers.shape[0], -1, len(AWQ_ORDER))
    ordered[:, :, list(AWQ_ORDER)] = numbers.view_as(ordered)
    return ordered.flatten(1)


def _groups(index: TensorInfo, read: Read, num_groups: int) -> Tensor:
    """Return the group of each column."""
    groups = read(index).long()
    if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise ModelLoadError(
            f"{index.shard}: {index.stored_as} names group {int(groups.max())} of {num_groups}; download it again"
        )
    return groups
