from dataclasses import replace

import pytest
import torch

from backend.kernels.ops import ExpertWeights
from backend.kernels.reference import ReferenceOps
from backend.kernels.triton_ops import TritonOps
from tests.interpreted.closeness import DTYPES, assert_close, each_in_a_dtype


def experts(count: int, hidden: int, inner: int, per_token: int, normalises: bool, dtype: torch.dtype) -> ExpertWeights:
    """Experts whose router's logits are the first numbers of a row, exactly."""
    draw = torch.Generator().manual_seed(count)
    gate_up = torch.randn((count, 2 * inner, hidden), generator=draw) / hidden**0.5
    down = torch.randn((count, hidden, inner), generator=draw) / inner**0.5
    router = torch.eye(count, hidden)
    return ExpertWeights(router.to(dtype), gate_up.to(dtype), down.to(dtype), per_token, normalises)


@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "inner", "per_token", "normalises", "dtype"),
    each_in_a_dtype([(1, 5, 96, 40, 2, True), (37, 3, 80, 72, 3, False), (70, 4, 64, 64, 1, True)]),
)
def test_each_row_is_the_sum_of_its_experts(
    tokens: int, count: int, hidden: int, inner: int, per_token: int, normalises: bool, dtype: torch.dtype
) -> None:
    """A part of a tile, several tiles of an expert, and widths that tiles do not divide."""
    weights = experts(count, hidden, inner, per_token, normalises, dtype)
    x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_close(TritonOps().experts(weights)(x), ReferenceOps().experts(weights)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_gates_and_biases_are_the_references(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    gate_up_bias, down_bias, router_bias = (torch.randn(shape, generator=draw) for shape in ((5, 80), (5, 96), (5,)))
    weights = replace(
        experts(5, 96, 40, 2, True, dtype),
        clamp=(1.702, 1.0),
        router_bias=router_bias.round().to(dtype),
        gate_up_bias=gate_up_bias.to(dtype),
        down_bias=down_bias.to(dtype),
    )
    x = torch.randn((9, 96), generator=draw).to(dtype)
    assert_close(TritonOps().experts(weights)(x), ReferenceOps().experts(weights)(x))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, which interprets
def test_rows_that_overflowed_leave_the_others_alone() -> None:
    weights = experts(5, 64, 48, 4, True, torch.float32)
    x = torch.randn((6, 64), generator=torch.Generator().manual_seed(1))
    x[:, 4] = 9.0  # all choose the last expert, as a row without an order would again and again
    expected = TritonOps().experts(weights)(x)
    broken = x.clone()
    broken[[0, 4]] = torch.nan
    found = TritonOps().experts(weights)(broken)
    assert torch.equal(found[[1, 2, 3, 5]], expected[[1, 2, 3, 5]])
