"""Log probabilities against transformers, in every batch and cut, after preemption and lost steps."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from backend import LLM, SamplingParams
from backend.llm import Completion
from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.worker import logprobs
from backend.worker.model_runner import ModelRunner
from tests.backend.families import random_model, save_checkpoint
from tests.backend.runners import EagerGraphStream, complete, make_runner
from tests.backend.test_llm import SCARCE, SHAPES, ScarceExecutor, prompts

TOLERANCE = 1e-4
PLAIN = (
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=64, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, max_tokens=30, presence_penalty=1.5, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=9, min_tokens=4, stop_token_ids=(5, 6, 7)),
)
KINDS = [PLAIN[n % len(PLAIN)] for n in range(len(prompts()))]
ASKING = [
    replace(kind, logprobs=(None, 0, 3, 20)[n % 4], prompt_logprobs=(2, None, 0)[n % 3]) for n, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def texts(checkpoint: Path) -> list[list[int]]:
    """What is generated when nobody asks."""
    return [one.token_ids for one in LLM(str(checkpoint)).generate(prompts(), KINDS, progress=False)]


@cache
def oracle() -> PreTrainedModel:
    return random_model("qwen2")


@cache
def scores_of(model: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """What a forward of transformers says, position by position."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def check(model: PreTrainedModel, completion: Completion, asked: SamplingParams) -> None:
    prompt, output = completion.prompt_token_ids, completion.token_ids
    scores = scores_of(model, (*prompt, *output))
    for found, tokens, first, count in (
        (completion.prompt_logprobs, prompt[1:], 0, asked.prompt_logprobs),
        (completion.logprobs, output, len(prompt) - 1, asked.logprobs),
    ):
        if count is None:
            assert found is None
            continue
        assert found is not None and len(found) == len(tokens)
        for row, token, entry in zip(scores[first:], tokens, found, strict=False):
            check_entry(row, token, entry, count)


def check_entry(scores: torch.Tensor, token: int, entry: TokenLogprobs, count: int) -> None:
    assert entry.logprob == pytest.approx(float(scores[token]), abs=TOLERANCE)
    above = int((scores > scores[token] + TOLERANCE).sum())
    assert above < entry.rank <= int((scores >= scores[token] - TOLERANCE).sum())
    assert entry.logprobs == pytest.approx(scores.topk(count).values.tolist(), abs=TOLERANCE)
    assert entry.logprobs == pytest.approx(scores[entry.token_ids].tolist(), abs=TOLERANCE)
    assert len(set(entry.token_ids)) == count
    assert (token in entry.token_ids) == (entry.rank <= count) or entry.logprob in entry.logprobs


def check_all(llm: LLM, texts: list[list[int]], times: int = 1) -> None:
    for _ in range(times):
        completions = llm.generate(prompts(), ASKING, progress=False)
        assert [one.token_ids for one in completions] == texts
        for completion, asked in zip(completions, ASKING, strict=True):
            check(oracle(), completion, asked)


@pytest.mark.parametrize("shape", ["chunked", "blocks of one token"])
def test_they_are_those_of_transformers_and_texts_are_as_if_nobody_asked(
    checkpoint: Path, texts: list[list[int]], shape: str
) -> None:
    """Twice: what the first call has left in the prefix cache is not taken where a prompt's are asked."""
    check_all(LLM(str(checkpoint), SHAPES[shape]), texts, times=2)


def test_they_survive_preemption_and_swapping(checkpoint: Path, texts: list[list[int]]) -> None:
    llm = LLM(str(checkpoint), replace(SCARCE, swap_space_bytes=2**22))
    check_all(llm, texts)
    assert llm.scheduler.counters.preemptions > 0


def test_they_survive_lost_steps(checkpoint: Path, texts: list[list[int]]) -> None:
    model = LLM(str(checkpoint), SHAPES["chunked"]).model
    llm = LLM.of(model, ScarceExecutor(model.runner))
    check_all(llm, texts)
    assert llm.scheduler.counters.lost_steps > 10


def test_a_prompt_is_scored_in_slices(
    checkpoint: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 4 * 131 * 5)
    check_all(LLM(str(checkpoint)), texts)


def test_answers_to_one_prompt_have_one_list_from_one_prefill(checkpoint: Path) -> None:
    llm, prompt = LLM(str(checkpoint)), prompts()[0] * 2
    asked = [SamplingParams(seed=n, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1) for n in range(4)]
    plain = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    completions = llm.generate([prompt] * 5, [*asked, plain], progress=False)
    assert llm.scheduler.counters.prompt_tokens == 2 * len(prompt), "those who ask, and the one who does not"
    for completion, asks in zip(completions, [*asked, plain], strict=True):
        check(oracle(), completion, asks)
    assert completions[1].token_ids == completions[4].token_ids
    assert len({tuple(one.token_ids) for one in completions}) == 4


def scored(runner: ModelRunner) -> list[Sequence]:
    """Sequences that ask, one in two for its prompt, some at a time."""
    asked = [replace(kind, logprobs=n % 3, prompt_logprobs=(2, None)[n % 2]) for n, kind in enumerate(KINDS)]
    sequences = [
        Sequence(PromptRequest(str(n), "", [token % 97 for token in prompt[:30]], asks, 20, n, frozenset()))
        for n, (prompt, asks) in enumerate(zip(prompts(), asked, strict=True))
    ]
    complete(runner, sequences, at_once=2)
    return sequences


def test_padded_steps_of_graphs_score_their_rows_and_steps_that_score_prompts_have_no_graph() -> None:
    stream = EagerGraphStream()
    padded = make_runner(device_stream=stream)
    padded.warm_up()
    for one, other in zip(scored(padded), scored(make_runner()), strict=True):
        assert one.output == other.output
        for found, expected in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert (found is None) == (expected is None)
            for entry, like in zip(found or (), expected or (), strict=True):
                assert entry.logprob == pytest.approx(like.logprob, abs=TOLERANCE)
                assert entry.token_ids == like.token_ids
    assert sum(graph.replays for graph in stream.graphs) > 8


def test_the_embedded_model_scores_as_transformers_do() -> None:
    llm = LLM("embedded")
    model = AutoModelForCausalLM.from_pretrained(llm.model.directory, dtype=torch.float32)
    asked = SamplingParams(temperature=0, max_tokens=20, logprobs=5, prompt_logprobs=5)
    said = [[{"role": "user", "content": "Count from 3 to 6."}], [{"role": "user", "content": "Tell me a story."}]]
    for completion in llm.generate(said, asked, progress=False):
        check(model, completion, asked)
