import numpy as np
import pytest
import torch

from backend.kernels import token_bitmask
from backend.kernels.torch_ops import TorchOps
from backend.kernels.triton_ops import TritonOps
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence
from backend.worker.logits_processors import LogitsProcessors
from tests.backend.kernels.closeness import check_bitmask


@pytest.mark.parametrize(("vocab", "words", "block"), [(1, 1, 32), (75, 3, 64), (1000, 30, 128), (64, 5, 4096)])
def test_masks_of_tokens_are_the_references(
    vocab: int, words: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_bitmask, "BLOCK", block)
    check_bitmask(TritonOps(), vocab, words)


def test_rules_of_requests_are_applied_as_by_torch() -> None:
    found = []
    kinds = (
        SamplingParams(allowed_token_ids=(3, 64, 69)),
        SamplingParams(),
        SamplingParams(bad_words=((5,), (2, 6)), logit_bias=((7, 1.5),)),
    )
    for ops in (TritonOps(), TorchOps()):
        processors = LogitsProcessors(4, 70, torch.device("cpu"), ops)
        for slot, sampling in enumerate(kinds):
            processors.fill_slot(NewSequence(slot, sampling, 0, [1, 2], 1))
        rows = processors.of(np.array([2, 1, 0]))
        assert rows is not None
        logits = torch.arange(210.0).view(3, 70)
        rows.apply(logits)
        found.append(logits)
    assert torch.equal(*found)
    assert found[0].isinf().sum(1).tolist() == [2, 0, 67]
