import pytest
import torch

from backend.kernels.self_check import TOLERANCE
from labs.benchmarks.gpu_check.adapters import low_rank_error
from tests.interpreted.closeness import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "longest"), [(3, 1), (5, 3)])
def test_low_rank_products_of_each_token_are_the_references(dtype: torch.dtype, tokens: int, longest: int) -> None:
    assert low_rank_error(torch.device("cpu"), dtype, tokens, longest, rank=3) < TOLERANCE[dtype]
