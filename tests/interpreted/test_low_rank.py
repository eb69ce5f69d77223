import pytest
import torch

from backend.kernels.self_check import TOLERANCE
from labs.benchmarks.gpu_check.adapters import low_rank_error
from tests.interpreted.closeness import each_in_a_dtype


@pytest.mark.parametrize(("tokens", "longest", "dtype"), each_in_a_dtype([(3, 1), (5, 3), (3, 3)]))
def test_low_rank_products_of_each_token_are_the_references(tokens: int, longest: int, dtype: torch.dtype) -> None:
    assert low_rank_error(torch.device("cpu"), dtype, tokens, longest, rank=3) < TOLERANCE[dtype]
