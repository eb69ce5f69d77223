from dataclasses import replace

import pytest
import torch

from backend.kernels import few_rows, reference
from backend.kernels.few_rows import MAX_ROWS, Product
from backend.kernels.triton_ops import TritonOps
from backend.model.decoder import Decoder
from backend.model.weights import random_weights
from tests.backend.paged_batch import PagedBatch
from tests.backend.runners import MODEL
from tests.interpreted.closeness import assert_close, each_in_a_dtype

WIDE = replace(MODEL, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("rows", "biased", "dtype"),
    each_in_a_dtype([(1, False), (5, True), (MAX_ROWS, False), (1, True), (5, False), (MAX_ROWS, True)]),
)
def test_a_product_with_its_activation_or_added_is_that_of_the_operations(
    rows: int, biased: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=draw).to(dtype) for shape in ((rows, 96), (128, 96)))
    weight *= 0.1  # so that results are about 1
    bias = torch.randn(128, generator=draw).to(dtype) if biased else None
    linear, residual = Product(weight, bias), torch.randn((rows, 128), generator=draw).to(dtype)
    assert_close(few_rows.multiply(torch.empty_like(residual), x, linear), linear(x))
    gated = torch.empty((rows, 64), dtype=dtype)
    assert_close(few_rows.multiply(gated, x, linear, gates=True), reference.silu_mul(linear(x)))
    expected = residual + linear(x)
    assert_close(few_rows.multiply(residual, x, linear, adds=True), expected)


@pytest.mark.nightly
def test_a_decoder_computes_the_same_with_few_rows_and_operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits() -> list[torch.Tensor]:
        decoder = Decoder(WIDE, random_weights(WIDE, torch.float32), TritonOps(), 64)
        batch = PagedBatch(decoder, ([5, 9, 2], [7] * 6))
        return [batch.step({0: 2, 1: 2}), batch.step({0: 1, 1: 4})]

    found = logits()
    monkeypatch.setattr(few_rows, "MAX_ROWS", 0)
    for few, expected in zip(found, logits(), strict=True):
        torch.testing.assert_close(few, expected, atol=1e-4, rtol=1e-4)
