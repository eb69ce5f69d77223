import pytest
import torch
from torch import Tensor
from torch.nn import functional

from backend.kernels import reference, torch_ops
from backend.kernels.torch_ops import TorchOps
from tests.backend.kernels.ragged import Heads, ragged


def test_with_sinks_the_mask_is_of_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case, sinks = ragged([(23, 60), (1, 9)], Heads(4, 2, 16), 16), torch.tensor([3.0, -2.0, 0.5, 1.0])
    arguments = (case.normal(24, 4, 16), case.k_cache, case.v_cache, case.step, 0.25, 20, sinks)
    attention, rows = functional.scaled_dot_product_attention, []

    def counted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        rows.append(mask.shape[1])
        return attention(q, k, v, mask, scale=scale)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(torch_ops, "SINKS_MASK_BYTES", 5 * 4 * 43 * 4)
    torch.testing.assert_close(TorchOps().paged_attention(*arguments), reference.paged_attention(*arguments))
    assert rows == [5, 5, 5, 5, 3, 1]
