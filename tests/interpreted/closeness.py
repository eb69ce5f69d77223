"""How close an interpreted kernel must come: Triton's interpreter truncates to bf16 where a GPU rounds to nearest."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backend.kernels.closeness import assert_within

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert_within(TOLERANCE, found, expected)


def each_in_a_dtype(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the parameters of cases, each in every dtype: one of them for each change, in turn, all at night."""
    pairs = product(enumerate(cases), enumerate(DTYPES))
    return [
        pytest.param(*case, dtype, marks=() if turn % len(DTYPES) == number else pytest.mark.nightly)
        for (turn, case), (number, dtype) in pairs
    ]
