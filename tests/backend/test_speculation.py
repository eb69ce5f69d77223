"""Texts are the same with drafted tokens and without, in every way to batch, and drafts leave nothing behind."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.llm import OfflineEngine
from backend.scheduler.batch import StepOutput, TokenLogprobs
from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.model_runner import ModelRunner, verify
from tests.backend.families import save_checkpoint
from tests.backend.runners import CONFIG, AheadStream, EagerGraphStream, make_runner
from tests.examples import examples

TOKENS = 28
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
FEW = (5, 6, 7)  # tokens of which an answer soon repeats pairs
DRAWN = SamplingParams(temperature=1, seed=3, max_tokens=TOKENS, allowed_token_ids=FEW, ignore_eos=True)
EACH = [
    GREEDY,
    DRAWN,
    replace(GREEDY, logprobs=2),
    replace(DRAWN, logprobs=0, seed=4),
    replace(DRAWN, stop_token_ids=(7,), min_tokens=12),
    replace(DRAWN, logit_bias=((5, 1.5),), top_p=0.9, min_p=0.05),
    replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.3),
    replace(DRAWN, bad_words=((5, 6),)),
]
PROMPTS = [[1, 2, 3, 4, 5, 6] * 4, [9, 8, 7], [5, 6, 7, 5, 6], [1, 2, 3, 4, 5, 6] * 4 + [11], [20] * 30]
SCARCE = EngineOptions(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=160, kv_memory_bytes=16 * 16 * 3 * 2 * 2 * 16 * 4
)
SHAPES = {
    "alone": EngineOptions(max_num_seqs=1, max_num_batched_tokens=256),
    "chunked": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk=7),
    "blocks of two tokens": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, block_size=2),
    "swapped": replace(SCARCE, swap_space_bytes=2**22),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(family, root / family) for family in ("llama3-scaling", "gemma3-scaling")}


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more of them there are, in vain too."""
    monkeypatch.setattr(DefaultHooks, "decode_seconds", lambda *_: 1.0)


def texts(llm: LLM) -> list[object]:
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(len(EACH))]
    found = llm.generate(prompts, EACH, progress=False)
    llm.scheduler.check_integrity()
    assert llm.scheduler.kv_manager.num_held == 0
    return [(one.token_ids, one.text, one.finish_reason, list(map(_rounded, one.logprobs or []))) for one in found]


def _rounded(one: TokenLogprobs) -> tuple[object, ...]:
    return round(one.logprob, 4), one.rank, one.token_ids, [round(each, 4) for each in one.logprobs]


DAILY = ("swapped",)


@pytest.mark.parametrize(
    "shape", [pytest.param(one, marks=() if one in DAILY else pytest.mark.nightly) for one in SHAPES]
)
def test_texts_are_those_without_drafts(checkpoints: dict[str, Path], shape: str) -> None:
    plain, drafting = (
        LLM(str(checkpoints["llama3-scaling"]), replace(SHAPES[shape], speculate=how)) for how in ("off", "lookup")
    )
    assert texts(drafting) == texts(plain)
    assert drafting.scheduler.drafting is not None
    drafted, accepted = drafting.scheduler.drafting.counts[""]
    assert drafted > accepted > 0
    assert drafting.scheduler._next_step <= plain.scheduler._next_step


@pytest.mark.parametrize("family", ["llama3-scaling", pytest.param("gemma3-scaling", marks=pytest.mark.nightly)])
def test_texts_are_the_same_where_a_step_is_planned_before_the_one_before_it_has_ended(
    checkpoints: dict[str, Path], family: str
) -> None:
    """With layers of a window, too, whose blocks are freed behind accepted tokens alone."""
    found = []
    for how in ("off", "lookup"):
        model = LLM(str(checkpoints[family]), replace(SCARCE, kv_memory_bytes=2**21, speculate=how)).model
        runner = ModelRunner(model.runner.decoder, model.runner.kv, model.runner.config, AheadStream())
        llm = LLM.of(model, runner)
        asked = [replace(one, max_tokens=48) for one in (GREEDY, DRAWN, replace(DRAWN, seed=5), GREEDY)]
        found.append([one.token_ids for one in llm.generate(PROMPTS[:4], asked, progress=False)])
        llm.scheduler.check_integrity()
        assert llm.scheduler.kv_manager.num_held == 0
    assert found[0] == found[1]


def test_a_step_with_drafts_runs_outside_the_graphs() -> None:
    found = []
    small = replace(CONFIG, max_num_seqs=2, max_model_len=32, block_size=8)
    for config in (small, replace(small, speculate="lookup")):
        runner = make_runner(device_stream=EagerGraphStream(), config=config)
        runner.warm_up()
        found.append(answers(runner, [([7, 8] * 6, GREEDY, None)]))
    assert found[0] == found[1]


Asked = tuple[list[int], SamplingParams, int | None]  # a prompt, and the tokens after which its client leaves


def answers(runner: ModelRunner, asked: list[Asked]) -> list[list[int]]:
    """The tokens of each, of whom one more arrives with each step."""
    scheduler = Scheduler(runner.config, FirstComeFirstServed())
    loop, coming, running = OfflineEngine(scheduler, runner), list(enumerate(asked)), dict[Sequence, int | None]()
    while coming or scheduler.has_work:
        if coming:
            n, (prompt, sampling, leaves) = coming.pop(0)
            most = min(sampling.max_tokens or 8, runner.config.max_model_len - len(prompt))
            sequence = Sequence(PromptRequest(str(n), "", prompt, sampling, most, n, frozenset({3})), float(n))
            running[sequence] = leaves
            scheduler.add(sequence)
        loop.step()
        for sequence, leaves in running.items():
            if leaves is not None and len(sequence.output) >= leaves:
                scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
    scheduler.check_integrity()
    assert scheduler.kv_manager.pool.num_free == runner.config.num_blocks
    return [sequence.output[:leaves] for sequence, leaves in running.items()]


PROMPT = st.lists(st.sampled_from((5, 6, 7, 8)), min_size=1, max_size=20)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.5, 1.0)),
    max_tokens=st.integers(1, 20),
    allowed_token_ids=st.sampled_from((None, FEW, (3, 5, 6))),
    ignore_eos=st.just(True),
)


@settings(max_examples=examples(3), deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.tuples(PROMPT, SAMPLING, st.none() | st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(16, 40),
    st.sampled_from((1, 2)),
    st.sampled_from((2, 7, None)),
)
def test_random_answers_of_random_models_are_the_same(
    model: int, asked: list[Asked], num_blocks: int, depth: int, chunk: int | None
) -> None:
    """Through chunks, preemptions and clients that leave."""
    config = replace(CONFIG, num_blocks=num_blocks, max_num_seqs=5, steps_in_flight=depth, prefill_chunk=chunk or 24)
    streams = [AheadStream() if depth == 2 else None for _ in range(2)]
    plain, drafting = (
        make_runner(config=one, seed=model, device_stream=stream)
        for one, stream in zip((config, replace(config, speculate="lookup")), streams, strict=True)
    )
    assert answers(plain, asked) == answers(drafting, asked)


def test_a_draft_is_accepted_up_to_the_first_token_that_is_not_drawn_in_its_place() -> None:
    scores = {index: TokenLogprobs(-float(index), 1, [], []) for index in range(9)}
    output = StepOutput(0, [4, 8, 2], 0.0, dict(scores))
    verify([(0, [4, 5, 9]), (2, [2, -1, 7])], [5, 6, 7, -1, 0, 0], output)
    assert output.token_ids == [4, 8, 2]
    assert output.forced == {0: [5, 6]}, "nothing behind a token without finite logits"
    assert output.logprobs == {index: scores[index] for index in range(3)}
    assert output.forced_logprobs == {0: [scores[3], scores[4]]}
