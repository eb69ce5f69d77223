"""How close kernels must come to the reference, and what rowwise ones are asked."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backend.kernels import reference
from backend.kernels.ops import Ops
from backend.kernels.reference import ReferenceOps

EPS = 1e-5
Rowwise = Callable[[Ops, Tensor, Tensor], Tensor]
ROWWISE: dict[str, Rowwise] = {
    "rms_norm": lambda ops, x, weight: ops.rms_norm(x, weight, EPS),
    "add_rms_norm": lambda ops, x, weight: ops.add_rms_norm(x, x.flip(0).contiguous(), weight, EPS),
    "silu_mul": lambda ops, x, _: ops.silu_mul(x),
    "gelu_mul": lambda ops, x, _: ops.gelu_mul(x),
}


def assert_within(tolerances: Mapping[torch.dtype, float], found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = tolerances[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def rowwise_results(name: str, ops: Ops, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What these kernels and the reference make of random rows."""
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn((rows, size), generator=generator) * 4).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    return ROWWISE[name](ops, x, weight), ROWWISE[name](ReferenceOps(), x, weight)


def check_residual(ops: Ops) -> None:
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    expected = x + residual
    ops.add_rms_norm(x, residual, torch.ones(64), EPS)
    torch.testing.assert_close(residual, expected)


def check_extremes(ops: Ops, dtype: torch.dtype) -> None:
    gate = torch.tensor([[0.0, -0.0, 88.0, -88.0, 200.0, -200.0, 6e4, -6e4, 6e-8, -6e-8, torch.inf, torch.nan]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1).to(dtype)
    torch.testing.assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up), equal_nan=True)
    torch.testing.assert_close(ops.gelu_mul(gate_up), reference.gelu_mul(gate_up), equal_nan=True)


def check_bitmask(ops: Ops, vocab: int, words: int) -> None:
    """Mask random rows of which words are empty, full and mixed, in logits whose rows have room behind them."""
    generator = torch.Generator().manual_seed(vocab)
    masks = torch.randint(-(2**31), 2**31, (5, words), generator=generator).to(torch.int32)
    kinds = torch.randint(0, 3, (5, words), generator=generator)
    bitmasks = masks.where(kinds == 0, -(kinds == 1).to(torch.int32)).contiguous()
    indices = torch.tensor([3, -1, 0, 3, 4, -1, 1], dtype=torch.int32)
    whole = torch.randn(7, vocab + 5, generator=generator)
    whole[2, 0] = torch.nan
    expected = whole.clone()
    reference.apply_token_bitmask(expected[:, :vocab], bitmasks, indices)
    ops.apply_token_bitmask(whole[:, :vocab], bitmasks, indices)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
    assert not expected[1].isinf().any()
