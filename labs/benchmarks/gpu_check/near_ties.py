"""Judges where two computations of one model differ: either token is right, or one of them is wrong.

Sums in another order differ in their last digits. Where the two most likely tokens are nearer to each other than that,
or a draw is that near to the boundary of two tokens, either is right, and all that follows differs. The tolerance is
`agreement`'s: of a logit, and of the mass that is drawn from.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backend.kernels.ops import StepInputs
from backend.kernels.reference import ReferenceOps
from backend.model.decoder import Decoder
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.paged_kv.kv_cache import KVCache
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence
from backend.worker.sampler import SlotSampler, sample
from labs.benchmarks.gpu_check.agreement import NEAR_TIE_LOGITS

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how its answer is sampled."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int


class Reference:
    """The model of a checkpoint on the CPU in fp32, by the reference of each operation."""

    def __init__(self, checkpoint: Path) -> None:
        self.config = read_model_config(checkpoint)
        weights = load_weights(checkpoint, self.config, torch.float32)
        self._decoder = Decoder(self.config, weights, ReferenceOps(), self.config.max_position)

    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits of the next token, [1, vocab] fp32."""
        count = len(token_ids)
        kv = KVCache(self._decoder.config, 1, count, torch.float32, CPU)
        step = StepInputs(
            token_ids=torch.tensor(token_ids),
            positions=torch.arange(count),
            slot_mapping=torch.arange(count),
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=torch.zeros((1, 1), dtype=torch.int32),
            num_seqs=1,
            max_query_len=count,
            max_context_len=count,
        )
        return self._decoder.logits(self._decoder.forward(step, kv)[-1:])

    def could_choose(self, request: Request, output: list[int], token: int) -> bool:
        """True if `token` may follow `output`."""
        logits = self.logits(request.prompt + output)
        nudges = (0.0,) if request.sampling.greedy else (-NEAR_TIE_LOGITS, 0.0, NEAR_TIE_LOGITS)
        return any(self._chosen(request, output, logits.clone(), nudge)[token] for nudge in nudges)

    def _chosen(self, request: Request, output: list[int], logits: Tensor, nudge: float) -> Tensor:
        """Return the tokens that are chosen, [vocab] bool, if the number that is drawn with is larger by `nudge`."""
        known = SlotSampler(1, self.config.vocab_size, self.config.eos_token_ids)
        known.admit(NewSequence(0, request.sampling, request.seed, request.prompt + output, len(request.prompt)))
        position = len(request.prompt) + len(output)
        batch = known.batch(np.array([0]), np.array([position]), CPU)
        if batch.uniforms is not None:
            batch = replace(batch, uniforms=(batch.uniforms + nudge).clamp(0, 1 - 1e-12))
        drawn = sample(logits, batch)
        if request.sampling.greedy:
            return logits[0] >= logits.max() - NEAR_TIE_LOGITS  # by now they are processed
        return torch.arange(self.config.vocab_size) == drawn


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of answers computed in another way."""

    wrong: int  # answers that part where they may not
    near: int  # answers that part at a near tie


def difference(
    reference: Reference, requests: list[Request], expected: list[list[int]], found: list[list[int]]
) -> Difference:
    """Judge each answer by the first token that differs."""
    wrong = near = 0
    for request, one, other in zip(requests, expected, found, strict=True):
        if one == other:
            continue
        same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if same is not None and all(reference.could_choose(request, one[:same], both[same]) for both in (one, other)):
            near += 1
        else:
            wrong += 1
    return Difference(wrong, near)
