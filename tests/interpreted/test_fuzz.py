"""Steps and rows of random shapes through every kernel, against the references: 16 for each change, 500 at night."""

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from backend.kernels import reference, sampling
from backend.kernels.ops import Ops, RotaryHeads, StepInputs
from backend.kernels.reference import ReferenceOps
from backend.kernels.triton_ops import TritonOps
from backend.sampling_params import SamplingParams
from tests.backend.kernels.ragged import Heads, Ragged, ragged
from tests.interpreted.closeness import DTYPES, assert_close
from tests.interpreted.test_attention import padded
from tests.interpreted.test_sampling import in_torch, rows
from tests.interpreted.test_store_kv import angles

EVERY_CHANGE, AT_NIGHT = 16, 500
EPS = 1e-5


def shapes(kind: int) -> list[object]:
    """Numbers of the shapes of one kind of four, of which those beyond the first few are for the night."""
    daily = EVERY_CHANGE // 4 + (kind < EVERY_CHANGE % 4)
    return [
        number if number < daily else pytest.param(number, marks=pytest.mark.nightly) for number in range(AT_NIGHT // 4)
    ]


@dataclass(frozen=True)
class Shape:
    """What a random step is made of."""

    case: Ragged
    num_decodes: int

    @classmethod
    def draw(cls, rng: Random, stored: bool) -> "Shape":
        decodes = [(1, rng.randint(1, 60)) for _ in range(rng.randint(0, 3))]
        new = [rng.randint(1, 12) for _ in range(rng.randint(0, 2))]
        prompts = [(count, count + rng.choice([0, rng.randint(0, 40)])) for count in new]
        key_heads, dim = rng.randint(1, 2), 2 * rng.randint(8, 24)
        heads = Heads(key_heads * rng.choice([1, 2, 3, 4, 7, 8]), key_heads, dim)
        spans = decodes + prompts or [(1, 5)]
        case = ragged(spans, heads, rng.choice([1, 4, 16, 24]), rng.choice(DTYPES), stored)
        return cls(case, rng.choice([0, len(decodes)]))


@pytest.mark.parametrize("number", shapes(0))
def test_attention_of_any_step_is_the_references(number: int) -> None:
    rng = Random(number)
    shape = Shape.draw(rng, stored=True)
    case, window = shape.case, rng.choice([None, None, 1, rng.randint(2, 50)])
    tokens = len(case.step.positions)
    step, rows_of_padding = replace(case.step, num_decodes=shape.num_decodes), 0
    if shape.num_decodes and rng.random() < 0.5:
        places = shape.num_decodes + rng.randint(0, 3)
        rows_of_padding = max(0, places - tokens) + rng.randint(0, 5)  # every place has a row
        prompts = case.step.num_seqs - shape.num_decodes + rng.randint(0, 2)
        step = padded(case.step, shape.num_decodes, places, prompts)
    q = case.normal(tokens + rows_of_padding, case.heads.queries, case.heads.dim)
    caches, scale = (case.k_cache, case.v_cache), case.heads.dim**-0.5
    found = TritonOps().paged_attention(q, *caches, step, scale, window)
    assert_close(found[:tokens], reference.paged_attention(q[:tokens], *caches, case.step, scale, window))


@pytest.mark.parametrize("number", shapes(1))
def test_storing_any_step_is_the_references(number: int) -> None:
    found, expected = (Shape.draw(Random(number), stored=False).case for _ in range(2))
    heads = found.heads
    tokens = len(found.step.positions)
    qkv = found.normal(tokens, (heads.queries + 2 * heads.keys) * heads.dim)
    norms = (found.normal(heads.dim), found.normal(heads.dim).square()) if number % 2 else (None, None)
    step = _partly_stored(found.step, Random(number))
    common = (qkv, RotaryHeads(heads.queries, heads.keys, angles(100, heads.dim), *norms, EPS))
    q = TritonOps().rope_and_store(*common, found.k_cache, found.v_cache, step)
    assert_close(q, reference.rope_and_store(*common, expected.k_cache, expected.v_cache, step))
    assert_close(found.pool, expected.pool)


def _partly_stored(step: StepInputs, rng: Random) -> StepInputs:
    """Some tokens are padding, and stored nowhere."""
    kept = torch.tensor([rng.random() < 0.8 for _ in step.slot_mapping])
    return replace(step, slot_mapping=step.slot_mapping.where(kept, -1))


@pytest.mark.parametrize("number", shapes(2))
def test_rowwise_operations_on_any_shape_are_the_references(number: int) -> None:
    rng = Random(number)
    dtype, size = rng.choice(DTYPES), 2 * rng.choice([1, rng.randint(2, 40), rng.randint(40, 2000)])
    generator = torch.Generator().manual_seed(number)
    x = (torch.randn((rng.randint(1, 5), size), generator=generator) * rng.choice([0.1, 4])).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)

    def results(ops: Ops) -> list[Tensor]:
        residual = x.flip(0).contiguous()
        return [ops.rms_norm(x, weight, EPS), ops.add_rms_norm(x, residual, weight, EPS), residual, ops.silu_mul(x)]

    for found, expected in zip(results(TritonOps()), results(ReferenceOps()), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("number", shapes(3))
def test_tokens_of_any_logits_and_filters_are_those_of_the_sampler_in_torch(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k up to the vocabulary and beyond, nearly flat logits, ties, impossible tokens, each filter with each other."""
    rng, generator = Random(number), torch.Generator().manual_seed(number)
    monkeypatch.setattr(sampling, "TILE", 2 ** rng.randint(5, 9))
    monkeypatch.setattr(sampling, "GATHERING", rng.randint(1, 3))
    monkeypatch.setattr(sampling, "CAPACITY", rng.choice([16, 128, 512]))
    monkeypatch.setattr(sampling, "WIDTH", rng.choice([32, 128]))
    vocab = rng.randint(2, 400)
    kinds = [
        SamplingParams(
            temperature=rng.choice([0, 1, rng.uniform(0.05, 2)]),
            top_k=rng.choice([0, 0, rng.randint(1, vocab), vocab + 5]),
            top_p=rng.choice([1, rng.uniform(1e-3, 1), 0.999]),
            min_p=rng.choice([0, 0, rng.uniform(1e-4, 1)]),
        )
        for _ in range(3)
    ]
    logits = torch.randn(3, vocab, generator=generator) * 10 ** rng.uniform(-6, 1)
    if rng.random() < 0.4:
        logits = logits.round(decimals=rng.randint(0, 1))
    if rng.random() < 0.3:
        logits[:, torch.rand(vocab, generator=generator) < 0.3] = -torch.inf
        logits[:, 0] = 0
    batch = rows(*kinds, seed=rng.randint(-(2**40), 2**40), position=number)
    assert torch.equal(sampling.sample_rows(logits.clone(), batch), in_torch(logits, batch))
