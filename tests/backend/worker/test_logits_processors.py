"""Biases, allowed tokens and bad words, by both samplers, against rules that are written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.kernels.ops import RowPenalties, RowSampling
from backend.kernels.torch_ops import TorchOps
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NO_TOKEN_ALLOWED, NewSequence
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.worker.logits_processors import where_allowed
from backend.worker.sampler import SlotSampler
from tests.backend.runners import CONFIG, complete, generate, make_runner

VOCAB = 40
TOKENS = st.integers(0, VOCAB + 5)  # some beyond the vocabulary
SOME_RULES = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    allowed_token_ids=st.none() | st.sets(TOKENS, min_size=1, max_size=9).map(lambda ids: tuple(sorted(ids))),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sets(st.integers(0, 9), max_size=3).map(tuple),
)


def by_the_book(logits: Tensor, sampling: SamplingParams, output: list[int]) -> int:
    """The greedy token under the rules, one after the other, of one row."""
    row = logits.clone()
    if sampling.allowed_token_ids is not None:
        allowed = [token for token in sampling.allowed_token_ids if token < VOCAB]
        row = torch.full_like(row, -torch.inf).index_copy(0, torch.tensor(allowed, dtype=torch.int64), row[allowed])
    for *beginning, end in sampling.bad_words:
        if output[len(output) - len(beginning) :] == beginning and len(output) >= len(beginning):
            row[end] = -torch.inf
    if len(output) < sampling.min_tokens:
        row[[*sampling.stop_token_ids, 0]] = -torch.inf
    for token, bias in sampling.logit_bias:
        if token < VOCAB:
            row[token] += bias
    return NO_TOKEN_ALLOWED if bool((row == -torch.inf).all()) else int(row.argmax())


@settings(max_examples=150, deadline=None)
@given(rules=st.lists(SOME_RULES | st.just(SamplingParams(temperature=0)), min_size=1, max_size=4), data=st.data())
def test_tokens_are_those_of_the_rules_by_the_book(rules: list[SamplingParams], data: st.DataObject) -> None:
    """Of few likely tokens, so that words of several are begun; some come with output, as after a recompute."""
    machine = SlotSampler(len(rules), VOCAB, eos_token_ids=(0,))
    known = [data.draw(st.lists(st.integers(0, 5), max_size=5)) for _ in rules]
    for slot, (sampling, output) in enumerate(zip(rules, known, strict=True)):
        machine.admit(NewSequence(slot, sampling, 0, [1, 2, *output], 2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    for _ in range(6):
        slots = np.array(data.draw(st.permutations(range(len(rules)))))[: data.draw(st.integers(1, len(rules)))]
        logits = torch.randn(len(slots), VOCAB, generator=generator)
        logits[:, :6] += 3
        positions = np.array([2 + len(known[slot]) for slot in slots])
        expected = [by_the_book(row, rules[slot], known[slot]) for row, slot in zip(logits, slots, strict=True)]
        tokens = machine.sample(logits, slots, positions)
        assert where_allowed(logits, tokens).tolist() == expected
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            known[slot].append(token)


FILTERS = (
    SamplingParams(temperature=0, allowed_token_ids=(90,)),
    SamplingParams(allowed_token_ids=(90,), top_k=5, top_p=0.5, min_p=0.1),
    SamplingParams(allowed_token_ids=(3,), bad_words=((3,),), repetition_penalty=1.5, logit_bias=((3, 100.0),)),
    SamplingParams(allowed_token_ids=(0, 7), min_tokens=2, stop_token_ids=(7,), presence_penalty=1),
)


def test_a_row_with_nothing_left_has_no_token_and_those_beside_it_have_theirs() -> None:
    machine, logits = SlotSampler(6, VOCAB, eos_token_ids=(0,)), torch.randn(6, VOCAB)
    expected = logits.argmax(-1).tolist()
    for slot, sampling in enumerate((SamplingParams(temperature=0), *FILTERS, SamplingParams(temperature=0))):
        machine.admit(NewSequence(slot, sampling, 0, [1, 2], 2))
    tokens = machine.sample(logits, np.arange(6), np.full(6, 2))
    assert all(0 <= token < VOCAB for token in tokens.tolist()), "what is fed to the next step is some token"
    assert where_allowed(logits, tokens).tolist() == [expected[0], *[NO_TOKEN_ALLOWED] * 4, expected[5]]
    assert not logits.isnan().any()


PROMPTS = [[5, 9, 11, 60], [5, 9, 11, 60], [7] * 20, [1, 2, 3]]
RULES = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=tuple(range(30))),
    SamplingParams(seed=1, max_tokens=12, logit_bias=((4, 100.0), (8, 99.0)), bad_words=((4, 8), (8, 8, 8))),
    SamplingParams(max_tokens=12, bad_words=((1, 2), (5,))),
]


class DeviceOps(TorchOps):
    """Has a `sample` of its own, greedy or drawn by the torch sampler's rules, as a device has."""

    def __init__(self) -> None:
        self.sample = self._greedy  # type: ignore[assignment]

    @staticmethod
    def _greedy(logits: Tensor, rows: RowSampling, penalties: RowPenalties | None) -> Tensor:
        return logits.argmax(-1)


def test_the_sampler_of_a_device_applies_the_same_rules() -> None:
    greedy = [replace(rules, temperature=0.0) for rules in RULES]
    assert generate(make_runner(DeviceOps()), PROMPTS, greedy) == generate(make_runner(TorchOps()), PROMPTS, greedy)


def test_rules_survive_preemption_and_hold_for_whole_texts() -> None:
    texts = generate(make_runner(), PROMPTS * 3, RULES * 3)
    squeezed = make_runner(config=replace(CONFIG, num_blocks=16))
    assert generate(squeezed, PROMPTS * 3, RULES * 3, at_once=5) == texts
    assert max(texts[1]) < 30
    assert set(texts[2]) == {4, 8}
    assert (4, 8) not in [*zip(texts[2], texts[2][1:], strict=False)]
    plain, *_ = generate(make_runner(), PROMPTS, [RULES[0]] * 4)
    assert texts[0] == plain


def test_log_probabilities_of_a_sampled_row_are_of_the_models_own_logits() -> None:
    asked = SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    biased = replace(asked, logit_bias=((4, 100.0),), presence_penalty=1.0)
    biased = replace(asked, logit_bias=((4, 100.0),), presence_penalty=1.0)
    sequences = [
        Sequence(PromptRequest("a", "", [5, 9], asked, 5, 0, frozenset())),
        Sequence(PromptRequest("b", "", [5, 9], biased, 5, 0, frozenset())),
    ]
    complete(make_runner(), sequences)
    plain, biased = (sequence.logprobs for sequence in sequences)
    assert plain is not None and biased is not None
    assert biased[0].token_ids == plain[0].token_ids
    assert biased[0].logprob < plain[0].logprob
    assert sequences[1].output[0] == 4 and biased[0].rank > 1


@pytest.mark.parametrize("sampling", RULES[1:])
def test_a_slot_that_is_taken_again_has_none_of_the_rules(sampling: SamplingParams) -> None:
    machine, logits = SlotSampler(1, VOCAB), torch.randn(1, VOCAB)
    for rules in (replace(sampling, temperature=0.0), SamplingParams(temperature=0)):
        machine.admit(NewSequence(0, rules, 0, [1], 1))
        token = machine.sample(logits.clone(), np.zeros(1, np.int64), np.ones(1, np.int64))
    assert token.item() == logits.argmax()
