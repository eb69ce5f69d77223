import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence
from backend.worker.sampler import SamplingBatch, SlotSampler, cutoffs, sample, uniforms
from backend.worker.slot_sampling import SlotSampling

VOCAB = 50
DRAWS = 20_000


def sampler(
    *sampling: SamplingParams, vocab: int = VOCAB, prompt: tuple[int, ...] = (1, 2), seed: int = 0
) -> SlotSampler:
    """Slot i holds sampling i, with seed `seed` + i."""
    result = SlotSampler(len(sampling), vocab, eos_token_ids=(0,))
    for slot, params in enumerate(sampling):
        result.admit(NewSequence(slot, params, seed + slot, [*prompt], len(prompt)))
    return result


def run(logits: Tensor, *sampling: SamplingParams, position: int = 2, seed: int = 0) -> list[int]:
    """One step over rows `logits`, row i sampled by sampling i."""
    slots = np.arange(len(sampling))
    machine = sampler(*sampling, vocab=logits.shape[1], seed=seed)
    tokens: list[int] = machine.sample(logits.clone(), slots, np.full(len(slots), position)).tolist()
    return tokens


def frequencies(logits: Tensor, params: SamplingParams) -> Tensor:
    """How often each token is drawn from `logits` [vocab] over DRAWS positions of one seed."""
    machine = sampler(params, vocab=len(logits))
    rows = logits.expand(DRAWS, -1).clone()
    tokens = machine.sample(rows, np.zeros(DRAWS, np.int64), np.arange(DRAWS) + 2)
    return tokens.bincount(minlength=len(logits))


def naive(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution by the book: sorted, filter by filter, each renormalised, ties at a boundary kept."""
    weights = {token: math.exp(logit / params.temperature) for token, logit in enumerate(logits)}
    largest = max(weights.values())
    weights = {token: w for token, w in weights.items() if w >= params.min_p * largest}
    if params.top_k > 0:
        boundary = sorted(weights.values(), reverse=True)[: params.top_k][-1]
        weights = {token: w for token, w in weights.items() if w >= boundary}
    if params.top_p < 1:
        total, mass = sum(weights.values()), 0.0
        for w in sorted(weights.values(), reverse=True):
            if mass < params.top_p * total:
                boundary, mass = w, mass + w
        weights = {token: w for token, w in weights.items() if w >= boundary}
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(len(logits))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=8, top_p=0.8, min_p=0.05),
    ],
)
def test_tokens_are_drawn_with_the_probabilities_of_the_naive_sampler(params: SamplingParams) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    expected = torch.tensor(naive(logits.tolist(), params)) * DRAWS
    observed = frequencies(logits, params)
    possible = expected > 0
    assert int(observed[~possible].sum()) == 0
    chi_square = float(((observed - expected)[possible].square() / expected[possible]).sum())
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=30, unique=True),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_drawn_tokens_are_the_ones_that_naive_filters_keep(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    x = torch.tensor([logits])
    x -= x.max()
    cutoff = cutoffs(x, torch.tensor([min_p]), torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    assert cutoff is not None
    kept = int((x >= cutoff).sum())
    expected = sum(p > 0 for p in naive(logits, params))
    slack = [sum(p > 0 for p in naive(logits, p)) for p in _nudged(params)]  # fp32 may round across a boundary
    assert min(expected, *slack) <= kept <= max(expected, *slack)


def _nudged(params: SamplingParams) -> list[SamplingParams]:
    return [
        SamplingParams(top_k=params.top_k, top_p=min(1, params.top_p * q), min_p=min(1, params.min_p * m))
        for q in (1 - 1e-5, 1 + 1e-5)
        for m in (1 - 1e-5, 1 + 1e-5)
    ]


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = torch.randn(8, VOCAB)
    assert run(logits, *[SamplingParams(temperature=0)] * 8) == logits.argmax(-1).tolist()


@settings(deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_token_alone_and_in_any_batch(data: st.DataObject) -> None:
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(top_k=7, min_p=0.01),
        SamplingParams(top_k=3, top_p=0.5, repetition_penalty=1.5),
        SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5, min_tokens=5),
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    logits = torch.randn(len(chosen), VOCAB, generator=torch.Generator().manual_seed(len(chosen)))
    together = run(logits, *chosen)
    alone = [run(logits[i : i + 1], params, seed=i)[0] for i, params in enumerate(chosen)]
    assert together == alone


def test_equal_logits_at_the_boundary_of_top_k_are_kept_together() -> None:
    logits = torch.tensor([5.0, 1.0, 5.0, 1.0, 5.0])
    assert frequencies(logits, SamplingParams(top_k=2)).nonzero().flatten().tolist() == [0, 2, 4]


def test_the_mass_of_top_p_counts_every_logit_that_equals_the_k_th() -> None:
    """The top 2 are a logit and seven equal ones. Half of the mass of all eight takes some of these, and so all."""
    logits = torch.tensor([3.0, *[2.0] * 7, -9.0])
    kept = frequencies(logits, SamplingParams(top_k=2, top_p=0.5)).nonzero().flatten().tolist()
    assert kept == list(range(8))


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = torch.randn(4, VOCAB)
    best = logits.argmax(-1).tolist()
    assert run(logits, *[SamplingParams(top_k=1)] * 4) == best
    assert run(logits, *[SamplingParams(top_p=1e-9)] * 4) == best
    assert run(logits, *[SamplingParams(min_p=1)] * 4) == best


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[7, VOCAB - 2]] = 0.0
    assert frequencies(logits, SamplingParams()).nonzero().flatten().tolist() == [7, VOCAB - 2]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_logits_still_give_a_token(scale: float) -> None:
    logits = torch.randn(4, VOCAB) * scale
    params = SamplingParams(temperature=2, top_p=0.5, top_k=9, repetition_penalty=100, presence_penalty=2)
    assert all(0 <= token < VOCAB for token in run(logits, *[params] * 4))


def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary() -> None:
    logits = torch.full((3, VOCAB), torch.nan)
    kinds = (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, top_k=3))
    assert all(0 <= token < VOCAB for token in run(logits, *kinds))


def test_seed_and_position_decide_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    draws = {
        (seed, at): run(logits, SamplingParams(), seed=seed, position=at)[0] for seed in range(9) for at in range(9)
    }
    assert draws == {key: run(logits, SamplingParams(), seed=key[0], position=key[1])[0] for key in draws}
    assert len(set(draws.values())) > 75


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(-128, 128), np.arange(256), indexing="ij")
    u = uniforms(seeds.ravel(), positions.ravel()).reshape(256, 256)
    assert 0 <= u.min() < u.max() < 1
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((counts - 1024) ** 2 / 1024).sum() < 63 + 4 * math.sqrt(126)
    for neighbour in (u[1:], u[:, 1:]):
        here = u[: neighbour.shape[0], : neighbour.shape[1]]
        assert abs(np.corrcoef(here.ravel(), neighbour.ravel())[0, 1]) < 0.02


def test_end_and_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 0], logits[:, 9], logits[:, 5] = 3.0, 2.0, 1.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9, 10_000))
    ignoring = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    for position, expected in ((2, [5, 0]), (3, [5, 0]), (4, [0, 0])):
        assert run(logits, params, ignoring, position=position) == expected


def test_limits_beyond_all_tokens_are_none() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    for most in (VOCAB, 2**31, 2**32 + 1, 2**63 - 1):
        assert run(logits, SamplingParams(top_k=most)) == run(logits, SamplingParams())
        slots = SlotSampling(1, VOCAB)
        slots.fill_slot(NewSequence(0, SamplingParams(top_k=most), 0, [1], 1))
        assert slots.top_k.tolist() == [VOCAB]
    logits[0, 0] = 100.0
    assert run(logits, SamplingParams(temperature=0, min_tokens=2**63 - 1), position=10_000) != [0]


def test_a_slot_forgets_who_held_it_before() -> None:
    machine = sampler(SamplingParams(temperature=2, top_k=3, min_p=0.1, presence_penalty=2, min_tokens=9))
    machine.admit(NewSequence(0, SamplingParams(temperature=0), 0, [1], 1))
    batch = machine.batch(np.array([0]), np.array([1]), torch.device("cpu"))
    assert batch == type(batch)()


def drawn(logits: Tensor, numbers: list[float]) -> list[int]:
    """The token of each row that is drawn at each number."""
    batch = SamplingBatch(torch.full((len(logits),), 0.9), torch.tensor(numbers, dtype=torch.float64))
    tokens: list[int] = sample(logits.clone(), batch).tolist()
    return tokens


@pytest.mark.parametrize("seed", range(6))
def test_a_row_draws_the_same_to_the_last_bit_beside_others(seed: int) -> None:
    """Its own number is on either side of the one from which on it draws another token."""
    logits = torch.randn(13, 97, generator=torch.Generator().manual_seed(seed))
    row, low, high = logits[-1:], 0.0, 1 - 2.0**-53
    first = drawn(row, [low])
    assert drawn(row, [high]) != first
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if drawn(row, [middle]) == first else (low, middle)
    for number in (low, high):
        assert drawn(logits, [0.3] * 12 + [number])[-1:] == drawn(row, [number])
