import torch
from torch import Tensor

from backend.kernels.ops import Ops
from backend.kernels.reference import ReferenceOps
from backend.kernels.triton_ops import TritonOps
from backend.model.decoder import Decoder
from backend.model.weights import random_weights
from tests.backend.paged_batch import PagedBatch
from tests.backend.runners import MODEL

PROMPTS = ([5, 9, 2], [7] * 6)


def logits(ops: Ops) -> list[Tensor]:
    """Of a chunk of each prompt, and of a step in which one of them is a decode."""
    decoder = Decoder(MODEL, random_weights(MODEL, torch.float32), ops, 64)
    batch = PagedBatch(decoder, PROMPTS)
    return [batch.step({0: 2, 1: 2}), batch.step({0: 1, 1: 4})]


def test_a_decoder_computes_the_same_over_triton_and_over_the_reference() -> None:
    for found, expected in zip(logits(TritonOps()), logits(ReferenceOps()), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
