import pytest
import torch

from backend.kernels.self_check import disagreements
from backend.kernels.triton_ops import TritonOps
from tests.backend.kernels.closeness import ROWWISE, check_extremes, check_residual, rowwise_results
from tests.interpreted.closeness import DTYPES, assert_close


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 514, 3000])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise_operations_are_the_references(name: str, rows: int, size: int, dtype: torch.dtype) -> None:
    assert_close(*rowwise_results(name, TritonOps(), rows, size, dtype))


def test_add_rms_norm_leaves_the_sum_in_the_residual() -> None:
    check_residual(TritonOps())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_pass_through_the_activation_as_in_the_reference(dtype: torch.dtype) -> None:
    check_extremes(TritonOps(), dtype)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16])
def test_the_self_check_accepts_what_we_ship(dtype: torch.dtype) -> None:
    assert disagreements(TritonOps(), dtype) == []
