"""How close an interpreted kernel must come: Triton's interpreter truncates to bf16 where a GPU rounds to nearest."""

import torch
from torch import Tensor

from tests.backend.kernels.closeness import assert_within

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert_within(TOLERANCE, found, expected)
