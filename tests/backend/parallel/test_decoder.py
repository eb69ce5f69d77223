"""A decoder on several ranks computes what one rank does, for every family and for unequal parts."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.kernels.torch_ops import TorchOps
from backend.model.decoder import Decoder
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.parallel.rank_group import Parallel
from tests.backend.families import FAMILIES, random_model
from tests.backend.paged_batch import PagedBatch
from tests.backend.parallel.ranks import on_ranks, taking_turns
from tests.examples import examples

# what differs in its parts
DAILY = ("llama-one-kv-head-wide", "llama-biases", "mistral-window", "qwen3-biases-tied", "qwen3-moe", "gpt-oss")
PROMPTS = [[5, 99, 3, 130, 0, 64, 7], [1, 2, 3], [77] * 11]


def decode(directory: Path, num_tokens: int, parallel: Parallel | None) -> tuple[Tensor, list[list[int]]]:
    """The logits of all prompts' tokens in one step, and the greedy tokens of a mixed batch."""
    config = read_model_config(directory)
    weights = load_weights(directory, config, torch.float32, shard=None if parallel is None else parallel.shard)
    decoder = Decoder(config, weights, TorchOps(), 128, parallel)
    logits = PagedBatch(decoder, PROMPTS).step({n: len(prompt) for n, prompt in enumerate(PROMPTS)})
    return logits, PagedBatch(decoder, PROMPTS).greedy(num_tokens, chunk=6, starts=[0, 1, 2])


@pytest.mark.parametrize(
    "family", [family if family in DAILY else pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES]
)
def test_logits_and_greedy_tokens_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    config, num_tokens = read_model_config(tmp_path), examples(2)
    with taking_turns():
        logits, tokens = decode(tmp_path, num_tokens, None)
    for size in (2, 4):
        for rank_logits, rank_tokens in on_ranks(config, size, tmp_path, partial(decode, tmp_path, num_tokens)):
            assert (rank_logits - logits).abs().max() <= 1e-5 * logits.abs().max()
            assert rank_tokens == tokens
