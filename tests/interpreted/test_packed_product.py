"""Products with packed weights are those of the numbers that the weights mean, in fp32."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from backend.kernels.integers import IntegerWeight, StoredWeight, multiplied_out, rounded, unpacked
from backend.kernels.packed_product import PackedProduct, PackedWeight
from backend.kernels.reference import ReferenceOps
from backend.kernels.triton_ops import TritonOps
from backend.model.decoder import Decoder
from backend.model.weights import Weights, random_weights
from tests.backend.kernels.test_integers import stored
from tests.backend.paged_batch import PagedBatch
from tests.backend.runners import MODEL
from tests.interpreted.closeness import assert_close

DTYPES = (torch.float16, torch.bfloat16)
FORMS = ("int4", "int8", "fp8", "wide groups of 4 bits", "wide groups of 8 bits")
SHAPES = ((1, 5, 40), (16, 130, 256), (17, 33, 300), (64, 16, 512), (130, 40, 200))  # rows, outputs, inputs


def integers(bits: int, group: int, outputs: int, inputs: int) -> IntegerWeight:
    """Return random integers with a scale and a minimum for each group, filled up to whole ones."""
    groups = -(-inputs // group)
    least, most = (0, 16) if bits == 4 else (-128, 128)
    numbers = torch.randint(least, most, (outputs, groups * group)).to(torch.int8)
    factors = torch.stack((0.5 + torch.rand(outputs, groups), torch.randn(outputs, groups)), 2) / most
    return IntegerWeight(bits, numbers, factors.half())


def packed(form: str, outputs: int, inputs: int) -> tuple[PackedWeight, Tensor]:
    """Return a weight, and the numbers [outputs, inputs] that it means, by their definition in fp32."""
    weight = torch.randn(outputs, inputs)
    if form == "fp8":
        weight[0] = 0
        scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scale.where(scale > 0, 1)).to(torch.float8_e4m3fn).float() * scale
        return PackedWeight.rounded_to_e4m3(weight), numbers
    if form in ("int4", "int8"):
        found = rounded(weight, int(form[-1]))
    else:
        bits = int(form.split()[-2])
        found = integers(bits, 16 * bits, outputs, inputs)
    return PackedWeight.of_integers(found), found.dequantised()[:, :inputs]


def product_of(x: Tensor, numbers: Tensor, bias: Tensor | None) -> Tensor:
    return (x.float() @ numbers.T + (0 if bias is None else bias.float())).to(x.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_a_product_is_that_of_the_numbers(rows: int, outputs: int, inputs: int, form: str) -> None:
    turn = FORMS.index(form) + rows
    dtype, bias = DTYPES[turn % 2], torch.randn(outputs).to(DTYPES[turn % 2]) if turn % 3 else None
    weight, numbers = packed(form, outputs, inputs)
    torch.testing.assert_close(weight.dequantised()[:, :inputs], numbers)
    x = (torch.randn(rows, inputs) / inputs**0.5).to(dtype)
    assert_close(PackedProduct((weight,), bias)(x), product_of(x, numbers, bias))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(60))
def test_a_product_of_any_shape_is_that_of_the_numbers(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, outputs, inputs = (int(torch.randint(1, most, (), generator=draw)) for most in (131, 200, 600))
    weight, numbers = packed(FORMS[seed % len(FORMS)], outputs, inputs)
    x = (torch.randn(rows, inputs) / inputs**0.5).half()
    assert_close(PackedProduct((weight,), None)(x), product_of(x, numbers, None))


def test_outputs_in_several_forms_of_a_file_are_one_product() -> None:
    """Of these Q4_K has minima and steps, Q6_K groups of 16 with steps, Q4_0 integers around 0."""
    parts = [part for kind in ("Q4_K", "Q4_K", "Q6_K", "Q4_0") for part in stored(kind, 20, 512, torch.float16).parts]
    weight, bias = StoredWeight((80, 512), torch.float16, tuple(parts)), torch.randn(80).half()
    assert [len(part) for part in unpacked(weight)] == [40, 20, 20]
    numbers = multiplied_out(replace(weight, dtype=torch.float32))
    x = (torch.randn(3, 512) / float(numbers.norm(dim=1).max())).half()
    found = TritonOps(quantization="stored").linear(weight, bias)
    assert isinstance(found, PackedProduct)
    assert_close(found(x), product_of(x, numbers, bias))
    plain = TritonOps().linear(weight, bias)
    assert not isinstance(plain, PackedProduct), "unless it is asked for, a GPU multiplies with 16 bits"
    assert_close(plain(x), product_of(x, numbers, bias))


def test_groups_that_blocks_do_not_consist_of_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 256 inputs"):
        PackedWeight.of_integers(integers(8, 256, 3, 512))


def meant(weights: Weights, quantization: str) -> Weights:
    """Return the weights with the numbers that products mean once they are rounded."""

    def numbers(weight: Tensor) -> Tensor:
        if quantization == "fp8":
            return PackedWeight.rounded_to_e4m3(weight).dequantised()[:, : weight.shape[1]].to(weight.dtype)
        return rounded(weight, int(quantization[-1])).dequantised()[:, : weight.shape[1]].to(weight.dtype)

    names = ("qkv", "output", "gate_up", "down")
    layers = [replace(layer, **{name: numbers(getattr(layer, name)) for name in names}) for layer in weights.layers]
    assert isinstance(weights.lm_head, Tensor)
    return replace(weights, layers=layers, lm_head=numbers(weights.lm_head))


@pytest.mark.parametrize(
    "quantization", ["int4", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("int8", "fp8"))]
)
def test_a_decoder_over_packed_weights_says_what_it_says_over_their_numbers(quantization: str) -> None:
    """In chunks of a prompt beside decodes, to the end of each text."""
    make = partial(random_weights, MODEL, torch.float16)
    packing, plain = TritonOps(quantization=quantization), ReferenceOps()
    pairs = ((make(), packing), (meant(make(), quantization), plain))
    batches = [PagedBatch(Decoder(MODEL, weights, ops, 64), ([5, 9, 2], [7] * 6)) for weights, ops in pairs]
    found, expected = (batch.step({0: 2, 1: 6}) for batch in batches)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    texts, expected_texts = (batch.greedy(3, 4, (0, 1)) for batch in batches)
    assert texts == expected_texts
