"""The device's sampler against the one in torch: the same tokens, for the same seeds, at the same positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.kernels import sampling
from backend.kernels.sampling import RowPenalties, RowSampling
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence
from backend.worker import sampler
from backend.worker.sampler import SamplingBatch
from tests.examples import examples

VOCAB = 200
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=2),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5, temperature=0.3),
    SamplingParams(top_k=100),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.999, temperature=2),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.8, min_p=0.05),
    SamplingParams(top_k=VOCAB, top_p=0.5),
    SamplingParams(min_p=1e-4, top_p=0.9),
    SamplingParams(top_k=150, top_p=0.95),
    SamplingParams(min_p=0.01, top_k=140),
)
Logits = Callable[[torch.Generator], Tensor]
LOGITS: dict[str, Logits] = {
    "normal": lambda generator: torch.randn(len(KINDS), VOCAB, generator=generator) * 3,
    "flat": lambda generator: torch.zeros(len(KINDS), VOCAB),
    "tied": lambda generator: torch.randint(-3, 3, (len(KINDS), VOCAB), generator=generator).float(),
    "nearly flat": lambda generator: torch.rand(len(KINDS), VOCAB, generator=generator) * 1e-4,
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TILE", 128)
    monkeypatch.setattr(sampling, "CAPACITY", 64)
    monkeypatch.setattr(sampling, "WIDTH", 32)
    monkeypatch.setattr(sampling, "GATHERING", 4)


def rows(*kinds: SamplingParams, seed: int = 0, position: int = 9) -> RowSampling:
    """Row i is sampled by kind i with seed `seed` + i."""
    numbers = torch.arange(len(kinds))
    return RowSampling(
        temperature=torch.tensor([kind.temperature for kind in kinds], dtype=torch.float32),
        min_p=torch.tensor([kind.min_p for kind in kinds], dtype=torch.float32),
        top_k=torch.tensor([max(0, kind.top_k) for kind in kinds], dtype=torch.int32),
        top_p=torch.tensor([kind.top_p for kind in kinds], dtype=torch.float32),
        seeds=numbers + seed,
        positions=numbers * 3 + position,
    )


def in_torch(logits: Tensor, batch: RowSampling) -> Tensor:
    uniforms = sampler.uniforms(batch.seeds.numpy(), batch.positions.numpy())
    return sampler.sample(
        logits.clone(),
        SamplingBatch(
            temperature=batch.temperature,
            uniforms=torch.from_numpy(uniforms),
            min_p=batch.min_p,
            top_k=batch.top_k.long(),
            top_p=batch.top_p.double(),
        ),
    )


@pytest.mark.parametrize(
    ("kind", "tile", "gathering"),
    [("normal", 64, 8), ("flat", 128, 4), ("tied", 128, 4), ("nearly flat", 128, 8)],
)
def test_tokens_are_those_of_the_sampler_in_torch(
    kind: str, tile: int, gathering: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "TILE", tile)
    monkeypatch.setattr(sampling, "GATHERING", gathering)
    every = examples(4, at_night=1)  # of the kinds: together the four have all of them
    kinds = KINDS[[*LOGITS].index(kind) % every :: every]
    logits = LOGITS[kind](torch.Generator().manual_seed(0))[: len(kinds)]
    batch = rows(*kinds, seed=2**40)
    assert torch.equal(sampling.sample_rows(logits.clone(), batch), in_torch(logits, batch))


@pytest.mark.parametrize("capacity", [1, pytest.param(256, marks=pytest.mark.nightly)])
def test_candidates_are_gathered_or_the_row_is_read_whole(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CAPACITY", capacity)
    kinds = KINDS[3::2]
    logits = LOGITS["normal"](torch.Generator().manual_seed(1))[: len(kinds)]
    batch = rows(*kinds)
    assert torch.equal(sampling.sample_rows(logits.clone(), batch), in_torch(logits, batch))


@pytest.mark.parametrize("filtered", [False, True])
def test_the_number_of_launches_is_independent_of_the_filters(filtered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: launched.append(self.name)

    for name in ("_survey", "gather", "_choose"):
        monkeypatch.setattr(sampling, name, Recorder(name))
    batch = replace(rows(*KINDS), some_min_p=False, some_top_k=filtered, some_top_p=False)
    sampling.sample_rows(torch.zeros(len(KINDS), VOCAB), batch)
    assert launched == (["_survey", "gather", "_choose"] if filtered else ["_survey", "_choose"])


def test_equal_logits_are_kept_or_cut_together() -> None:
    kinds = [SamplingParams(top_k=2), SamplingParams(top_p=0.3), SamplingParams(min_p=1)] * 3
    logits = torch.tensor([5.0, 1.0, 5.0, -3.0, 5.0]).repeat(len(kinds), 1)
    batch = rows(*kinds)
    tokens = sampling.sample_rows(logits.clone(), batch)
    assert set(tokens.tolist()) == {0, 2, 4}
    assert torch.equal(tokens, in_torch(logits, batch))


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    kinds = KINDS[6], KINDS[11]
    logits = torch.randn(len(kinds), VOCAB)
    batch = rows(*kinds)
    together = sampling.sample_rows(logits.clone(), batch)
    alone = replace(rows(kinds[1]), seeds=batch.seeds[1:], positions=batch.positions[1:])
    assert sampling.sample_rows(logits[1:].clone(), alone) == together[1]


def test_the_seed_and_the_position_decide_the_draw() -> None:
    logits = torch.zeros(1, 500).expand(12, -1).contiguous()
    batch = replace(rows(*[SamplingParams()] * 12, seed=-5), some_min_p=False, some_top_k=False, some_top_p=False)
    tokens = sampling.sample_rows(logits.clone(), batch)
    assert torch.equal(tokens, in_torch(logits, batch))
    assert len(set(tokens.tolist())) > 9


def test_tokens_of_no_probability_are_never_drawn() -> None:
    kinds = KINDS[::3]
    logits = torch.full((len(kinds), VOCAB), -torch.inf)
    logits[:, [7, VOCAB - 2]] = 0.0
    assert set(sampling.sample_rows(logits, rows(*kinds)).tolist()) <= {7, VOCAB - 2}


@pytest.mark.parametrize("top_k", [0, VOCAB])
def test_the_largest_draw_takes_a_token_that_has_a_probability(top_k: int) -> None:
    seed, position = 6898019901592872516, 7
    assert sampler.uniforms(np.array([seed]), np.array([position])) == 1 - 2.0**-53
    logits = torch.full((8, VOCAB), -1e9)
    logits[:, 70:110] = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    batch = rows(*[SamplingParams(temperature=0.7, top_k=top_k)] * 8)
    batch = replace(batch, seeds=torch.full_like(batch.seeds, seed), positions=torch.full_like(batch.seeds, position))
    assert sampling.sample_rows(logits, batch).tolist() == [109] * 8


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_a_low_temperature_rounds_alike_in_every_tile(temperature: float) -> None:
    """Quotients of a million and a distance of one: what they are rounded by is a quarter."""
    kinds = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.9)] * examples(2, at_night=4)
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((len(kinds), VOCAB), -1e9)
    near = torch.rand(len(kinds), 5, generator=generator) * temperature
    logits[:, [3, 5, 9, 70, 190]] = torch.rand(len(kinds), 1, generator=generator) * 30 + 10 - near
    batch = replace(rows(*kinds), temperature=torch.full((len(kinds),), temperature))
    assert torch.equal(sampling.sample_rows(logits.clone(), batch), in_torch(logits, batch))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary(value: float) -> None:
    kinds = KINDS[1:12:3]
    tokens = sampling.sample_rows(torch.full((len(kinds), VOCAB), value), rows(*kinds))
    assert all(0 <= token < VOCAB for token in tokens.tolist())


def test_penalties_are_those_of_the_sampler_in_torch_and_count_what_is_sampled() -> None:
    kinds = (
        SamplingParams(temperature=0, repetition_penalty=1.8),
        SamplingParams(),
        SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5, top_p=0.9),
        SamplingParams(frequency_penalty=0.7, top_k=40),
    )
    slots = torch.tensor([5, 0, 3, 1])
    machine = sampler.SlotSampler(6, VOCAB)
    penalties = RowPenalties(
        slots=slots,
        presence=torch.tensor([kind.presence_penalty for kind in kinds]),
        frequency=torch.tensor([kind.frequency_penalty for kind in kinds]),
        repetition=torch.tensor([kind.repetition_penalty for kind in kinds]),
        in_prompt=torch.zeros(6, VOCAB, dtype=torch.bool),
        output_counts=torch.zeros(6, VOCAB, dtype=torch.int32),
    )
    for slot, kind in zip(slots.tolist(), kinds, strict=True):
        prompt = [slot, slot + 1, slot]
        penalties.in_prompt[slot, prompt] = True
        machine.admit(NewSequence(slot, replace(kind), int(slot == 5), prompt, 3))
    generator = torch.Generator().manual_seed(4)
    for position in range(3, 6):
        logits = torch.randn(4, VOCAB, generator=generator)
        positions = np.full(4, position)
        batch = replace(
            rows(*kinds), seeds=(slots == 5).long(), positions=torch.from_numpy(positions), top_p=rows(*kinds).top_p
        )
        expected_logits, found_logits = logits.clone(), logits.clone()
        expected = machine.sample(expected_logits, slots.numpy(), positions)
        assert torch.equal(sampling.sample_rows(found_logits, batch, penalties), expected)
        torch.testing.assert_close(found_logits, expected_logits)
        penalised = [5, 3, 1]
        assert penalties.output_counts[penalised].sum() == 3 * (position - 2)
