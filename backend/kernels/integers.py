"""Weights of products in integers of 4 or 8 bits: rounded to them here, or as a file has them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

ROUNDED_BITS = {"int4": 4, "int8": 8}  # of the kinds of quantization that round to integers
ROUNDED_INPUTS = 32  # of an output, whose weights share a scale when they are rounded here


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight whose numbers are `scale * integer + minimum`, the product and the sum each rounded in fp32.

    A block of an output's inputs has one or two `factors`: the scale and, if there are two, the minimum. With `steps`,
    each group of the block multiplies the factors by its own.
    """

    bits: int  # 4: integers from 0 to 15, or from -8 to 7 without a minimum; 8
    integers: Tensor  # [outputs, inputs] int8
    factors: Tensor  # [outputs, blocks, 1 or 2] fp16
    steps: Tensor | None = None  # [outputs, groups, 1 or 2] int8

    def __len__(self) -> int:
        return len(self.integers)

    @property
    def group(self) -> int:
        """The inputs of an output that share a scale."""
        return self.integers.shape[1] // (self.factors if self.steps is None else self.steps).shape[1]

    @property
    def form(self) -> tuple[int, int, int, int]:
        """Bits, inputs of a group, groups of a block, and factors: weights of one form can be one."""
        groups = 1 if self.steps is None else self.steps.shape[1] // self.factors.shape[1]
        return self.bits, self.group, groups, self.factors.shape[2]

    def spread_factors(self) -> Tensor:
        """Return the scale and, if there is one, the minimum of each group: [outputs, groups, 1 or 2] fp32."""
        factors = self.factors.float()
        if self.steps is None:
            return factors
        return factors.repeat_interleave(self.form[2], 1) * self.steps

    def dequantised(self) -> Tensor:
        """Return the numbers [outputs, inputs] in fp32."""
        scale, *minimum = self.spread_factors().unsqueeze(3).unbind(2)
        numbers = self.integers.view(*scale.shape[:2], self.group) * scale
        if minimum:
            numbers += minimum[0]
        return numbers.view(self.integers.shape)

    def bound(self) -> float:
        """Return a bound of the numbers' absolute values; infinite or NaN where one is."""
        largest = torch.tensor([128.0 if self.bits == 8 else 15.0, 1.0])
        return float((self.spread_factors().abs() * largest[: self.factors.shape[2]]).sum(2).max())


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of integers as a file has it, of which each part of the outputs is unpacked when a kernel takes it over.

    `dtype`: the type of the inputs that it is multiplied with.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[Callable[[], IntegerWeight], ...]

    def numel(self) -> int:
        return prod(self.shape)


Weight = Tensor | StoredWeight


def unpacked(weight: StoredWeight) -> list[IntegerWeight]:
    """Return the weight's integers, neighbouring parts of one form as one."""
    by_form = groupby((part() for part in weight.parts), lambda part: part.form)
    return [joined([*same]) for _, same in by_form]


def multiplied_out(weight: Weight) -> Tensor:
    """Return the weight [outputs, inputs] in its type."""
    if isinstance(weight, Tensor):
        return weight
    return torch.cat([part().dequantised().to(weight.dtype) for part in weight.parts])


def rounded(weight: Tensor, bits: int) -> IntegerWeight:
    """Return `weight` [outputs, inputs] in integers, filled up with zeros to whole groups of `ROUNDED_INPUTS` inputs.

    With 8 bits the largest of a group becomes 127 or -127, as in GGUF's Q8_0. With 4 bits the least becomes 0 and the
    largest 15, as in Q4_1.
    """
    outputs = weight.shape[0]
    wide = functional.pad(weight.float(), (0, -weight.shape[1] % ROUNDED_INPUTS)).view(outputs, -1, ROUNDED_INPUTS)
    if bits == 8:
        factors, least, most = (wide.abs().amax(2, keepdim=True) / 127).half(), -127, 127
    else:
        low, high = wide.aminmax(dim=2, keepdim=True)
        factors, least, most = torch.cat(((high - low) / 15, low), 2).half(), 0, 15
        wide = wide - factors[:, :, 1:].float()
    scale = factors[:, :, :1].float()
    integers = torch.where(scale > 0, wide / scale, 0.0).round_().clamp_(least, most).to(torch.int8)
    return IntegerWeight(bits, integers.flatten(1), factors)


def joined(weights: list[IntegerWeight]) -> IntegerWeight:
    """Return the outputs of weights of one form, in order."""
    if len(weights) == 1:
        return weights[0]
    steps = [one.steps for one in weights if one.steps is not None]
    return IntegerWeight(
        weights[0].bits,
        torch.cat([one.integers for one in weights]),
        torch.cat([one.factors for one in weights]),
        torch.cat(steps) if steps else None,
    )


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """An integer weight as `PackedLinear` in csrc/kernels.h describes it."""

    weight: Tensor
    factors: Tensor
    steps: Tensor | None

    @classmethod
    def of(cls, weight: IntegerWeight, panel: int) -> "PackedIntegers":
        padding = -weight.integers.shape[0] % panel

        def panels(tensor: Tensor) -> Tensor:
            """Return [panels, panel, columns, ...] of a tensor [outputs, columns, ...], filled up with zeros."""
            whole = torch.cat((tensor, tensor.new_zeros(padding, *tensor.shape[1:]))) if padding else tensor
            return whole.view(-1, panel, *tensor.shape[1:])

        integers, pairs = panels(weight.integers), 16 // weight.bits
        if weight.bits == 4 and weight.factors.shape[2] == 1:
            integers = integers + 8
        words = integers.view(*integers.shape[:2], -1, pairs, 2).permute(0, 2, 1, 4, 3).contiguous()
        if weight.bits == 4:
            words = words[..., ::2] | words[..., 1::2] << 4
        steps = None if weight.steps is None else panels(weight.steps).permute(0, 2, 3, 1).contiguous()
        return cls(words, panels(weight.factors).permute(0, 2, 3, 1).contiguous(), steps)
