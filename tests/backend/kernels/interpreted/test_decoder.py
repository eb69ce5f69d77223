from dataclasses import replace

import torch
from torch import Tensor

from backend.kernels.ops import Ops
from backend.kernels.reference import ReferenceOps
from backend.kernels.triton_ops import TritonOps
from backend.model import Decoder
from backend.weights import random_weights
from benchmarks.kernels_cpu import LLAMA_32M
from tests.backend.paged_batch import PagedBatch

CONFIG = replace(
    LLAMA_32M,
    vocab_size=97,
    hidden_size=96,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    max_position=64,
    qk_norm=True,
)
PROMPTS = ([5, 9, 2], [7] * 11, list(range(20)))


def logits(ops: Ops) -> list[Tensor]:
    """Of a chunk of each prompt, and of a step in which two of them are decodes."""
    decoder = Decoder(CONFIG, random_weights(CONFIG, torch.float32), ops, 64)
    batch = PagedBatch(decoder, PROMPTS)
    return [batch.step({0: 2, 1: 10, 2: 7}), batch.step({0: 1, 1: 1, 2: 13})]


def test_a_decoder_computes_the_same_over_triton_and_over_the_reference() -> None:
    for found, expected in zip(logits(TritonOps()), logits(ReferenceOps()), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
