"""Products with weights of 4 and 8 bits have the bits of their definition, whatever else is in the batch."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from backend.gguf.quants import integers
from backend.gguf.reader import FORMATS
from backend.kernels.cpu import CpuOps, select_ops
from backend.kernels.integers import IntegerWeight, StoredWeight, multiplied_out, rounded
from backend.kernels.ops import Linear
from tests.backend.gguf.files import TYPES, random_blocks
from tests.backend.gguf.reference import KINDS

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = (*range(1, 14), 40)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once: the product of two fp32 numbers is exact in fp64."""
    return (a.double() * b.double() + c.double()).float()


def defined(weight: IntegerWeight, x: Tensor) -> Tensor:
    """The product as `csrc/linear.cpp` says: one chain of groups in fp32, each of an exact sum of integers."""
    x = functional.pad(x.float(), (0, weight.integers.shape[1] - x.shape[1])).view(len(x), -1, weight.group)
    largest = x.abs().amax(2)
    bound = torch.full_like(largest, 32767)  # of a number alone torch would multiply with the inverse
    of_inputs = largest / bound
    inputs = (x * (bound / largest).unsqueeze(2)).round_().double()
    is_centred = weight.bits == 4 and weight.factors.shape[2] == 1
    numbers = weight.integers.view(len(weight), -1, weight.group).double() + 8 * is_centred
    factors = weight.spread_factors()
    total = torch.zeros(len(x), len(weight))
    for g in range(x.shape[1]):
        products = (inputs[:, g] @ numbers[:, g].T).float()
        total = fused(products * of_inputs[:, g, None], factors[:, g, 0], total)
        if is_centred or factors.shape[2] == 2:
            minimum = -8 * factors[:, g, 0] if is_centred else factors[:, g, 1]
            total = fused((inputs[:, g].sum(1).float() * of_inputs[:, g])[:, None], minimum, total)
    return total


def stored(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> StoredWeight:
    form = FORMATS[TYPES[kind]]
    data = torch.frombuffer(bytearray(random_blocks(kind, (outputs, inputs), seed=outputs)), dtype=torch.uint8)
    rows = data.view(outputs, inputs // form.size * form.num_bytes)
    return StoredWeight((outputs, inputs), dtype, (partial(integers, kind, rows),))


def same(product: Linear, x: Tensor, expected: Tensor) -> bool:
    return all(torch.equal(product(x[-rows:]), expected[-rows:].to(x.dtype)) for rows in ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_thread")
def test_a_product_with_stored_blocks_has_the_bits_of_its_definition(
    native: CpuOps, kind: str, dtype: torch.dtype
) -> None:
    weight, x = stored(kind, 70, 512, dtype), torch.randn(40, 512).to(dtype)
    bias = torch.randn(70).to(dtype)
    assert same(native.linear(weight, bias), x, defined(weight.parts[0](), x) + bias.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 200), (130, 96), (600, 45)])
@pytest.mark.usefixtures("one_thread", "native")
def test_a_product_with_rounded_weights_has_the_bits_of_its_definition(
    outputs: int, inputs: int, bits: int, dtype: torch.dtype
) -> None:
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(40, inputs).to(dtype)
    product = select_ops(CPU, dtype, "native", quantization=f"int{bits}").linear(weight, None)
    assert same(product, x, defined(rounded(weight, bits), x))


def test_a_product_is_near_that_of_the_dequantised_weights(native: CpuOps) -> None:
    """Inputs of 16 bits, relative to the largest of 32: the products of fp32 to five digits."""
    for kind in KINDS:
        weight, x = stored(kind, 64, 1024, torch.float32), torch.randn(9, 1024)
        exact, scale = x.double() @ multiplied_out(weight).double().T, x.norm(dim=1, keepdim=True)
        error = (native.linear(weight, None)(x) - exact).abs() / (scale * multiplied_out(weight).norm(dim=1))
        assert error.max() < 5e-5, kind


def test_parts_in_several_formats_are_one_product_on_any_number_of_threads(native: CpuOps) -> None:
    parts = [stored(kind, outputs, 512, torch.float32) for kind, outputs in (("Q4_K", 70), ("Q4_K", 30), ("Q6_K", 50))]
    whole = StoredWeight((150, 512), torch.float32, tuple(part.parts[0] for part in parts))
    bias, x = torch.randn(150), torch.randn(40, 512)
    expected = torch.cat([defined(part.parts[0](), x) for part in parts], dim=1) + bias
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same(native.linear(whole, bias), x, expected)
    finally:
        torch.set_num_threads(before)


def test_zeros_and_numbers_that_are_none_stay_what_they_are(native: CpuOps) -> None:
    weight, x = stored("Q8_0", 40, 64, torch.float32), torch.randn(4, 64)
    x[1] = 0
    x[2, 40], x[3, 3] = torch.inf, torch.nan
    found = native.linear(weight, None)(x)
    assert found[0].isfinite().all() and not found[1].any()
    assert found[2:].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest_integer_of_the_range(bits: int) -> None:
    weight = torch.randn(40, 70)
    weight[3, :32], weight[4, :32] = 0, 0.25
    found = rounded(weight, bits)
    numbers = found.dequantised()
    scale = found.spread_factors()[..., 0].repeat_interleave(32, 1)
    assert ((numbers[:, :70] - weight).abs() <= 0.51 * scale[:, :70] + 2e-3 * weight.abs()).all()
    assert torch.equal(numbers[3, :32], weight[3, :32]) and (numbers[4, :32] - 0.25).abs().max() < 1e-3
    assert found.bound() >= numbers.abs().max()
