"""The whole engine, offline: against transformers' generate on checkpoints it made, and against itself."""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.errors import ConfigError, InvalidRequest, MemoryExhausted
from backend.grammar import Grammar, GrammarKind
from backend.scheduler.batch import Batch, StepOutput
from backend.worker.device_stream import CpuStream, LaunchedWork, Work
from backend.worker.executor import Executor, PendingStep
from backend.worker.model_runner import ModelRunner
from tests.backend.families import likeliest, random_model, save_checkpoint
from tests.backend.runners import AheadStream
from tests.examples import examples

NUM_TOKENS = examples(32, at_night=64)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, top_p=0.95, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
SCARCE = EngineOptions(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=200,
    kv_memory_bytes=14 * 16 * 3 * 2 * 2 * 16 * 4,  # blocks x tokens x layers x K/V x heads x dim x fp32
)
# layers with a window free what is behind it: of one group of three each block has a third
SCARCE_WINDOWED = replace(SCARCE, max_model_len=160, kv_memory_bytes=34 * 16 * 1 * 2 * 2 * 16 * 4)
WINDOWED = ("mistral-window", "gemma3-scaling", "gpt-oss")
FAMILIES = ("mistral-window", "llama3-scaling", "qwen2", "qwen3", "qwen3-moe", "gemma3-scaling", "gpt-oss")

# every way to batch, small enough that each one queues, chunks and, where it can, preempts
SHAPES: dict[str, EngineOptions] = {
    "alone": EngineOptions(max_num_seqs=1, max_num_batched_tokens=256),
    "chunked": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk=7),
    "unchunked": EngineOptions(max_num_seqs=4, prefill_chunk="off"),
    "one step in flight": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, steps_in_flight=1),
    "blocks of one token": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, block_size=1),
}


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 90, (9,), generator=generator).tolist()
    return [torch.randint(131, (length,), generator=generator).tolist() for length in lengths]


_model = cache(random_model)


def oracle(family: str, answers: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """What transformers answers to the first prompts, if these answers are right so far."""
    assert {len(answer) for answer in answers} == {num_tokens}
    return [likeliest(_model(family), *each) for each in zip(prompts(), answers, strict=False)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(family, root / family) for family in FAMILIES}


def outputs(llm: LLM, sampling: SamplingParams) -> list[list[int]]:
    completions = llm.generate(prompts(), sampling, progress=False)
    assert llm.scheduler.kv_manager.num_held == 0
    return [completion.token_ids for completion in completions]


def each_shape_and_each_family() -> list[object]:
    """Every pair at night; for every change each shape with a window, which is hardest, and each family in chunks."""
    pairs = [(shape, family) for shape in SHAPES for family in FAMILIES]
    daily = [shape == "chunked" or family == FAMILIES[0] for shape, family in pairs]
    return [
        pytest.param(*pair, marks=() if is_daily else pytest.mark.nightly)
        for pair, is_daily in zip(pairs, daily, strict=True)
    ]


@pytest.mark.parametrize(("shape", "family"), each_shape_and_each_family())
def test_greedy_tokens_are_those_of_transformers(checkpoints: dict[str, Path], family: str, shape: str) -> None:
    llm = LLM(str(checkpoints[family]), SHAPES[shape])
    found = outputs(llm, GREEDY)
    assert found == oracle(family, found)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "qwen3"])
def test_swapped_blocks_come_back_bit_for_bit(checkpoints: dict[str, Path], family: str) -> None:
    """Of fourteen blocks most are given up before anybody asks for them again."""
    scarce = SCARCE_WINDOWED if family in WINDOWED else SCARCE
    llm = LLM(str(checkpoints[family]), replace(scarce, swap_space_bytes=2**22))
    assert llm.model.engine_config.window_groups == (2 if family in WINDOWED else 0)
    found = outputs(llm, GREEDY)
    assert outputs(llm, GREEDY) == found == oracle(family, found)
    counters = llm.scheduler.counters
    assert counters.preemptions > 0 and counters.swapped_in > 0
    again = outputs(llm, DRAWN)
    assert again == outputs(LLM(str(checkpoints[family]), scarce), DRAWN)


@pytest.mark.nightly
@pytest.mark.parametrize("family", WINDOWED)
def test_all_that_a_window_meets_at_once_changes_no_token(checkpoints: dict[str, Path], family: str) -> None:
    """Two steps in flight, of which some are lost in the end; texts of many windows with common beginnings, several
    answers to one prompt, twice as many as there is memory for, again once they were swapped.
    """
    options = replace(SCARCE_WINDOWED, swap_space_bytes=2**22, prefill_chunk=24)
    model = LLM(str(checkpoints[family]), options).model
    runner = ModelRunner(model.runner.decoder, model.runner.kv, model.runner.config, AheadStream())
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(131, (90,), generator=generator).tolist()
    own = [torch.randint(131, (9,), generator=generator).tolist() for _ in range(4)]
    asked = [*own, common + own[0], common + own[0], own[2] * 9, common[:70] + own[3], common + own[0], *own]
    whole, scarce = [LLM.of(model, executor) for executor in (runner, ScarceExecutor(runner))]
    for llm in (whole, whole, scarce, scarce):
        found = [one.token_ids for one in llm.generate(asked, replace(GREEDY, max_tokens=60), progress=False)]
        assert found == [likeliest(_model(family), *each) for each in zip(asked, found, strict=True)]
        llm.scheduler.check_integrity()
        assert llm.scheduler.kv_manager.num_held == 0
    counters = whole.scheduler.counters
    assert min(counters.swapped_in, counters.preemptions, counters.cached_tokens) > 0
    assert scarce.scheduler.counters.lost_steps > 10


class EarlyCopies(CpuStream):
    """Makes the copies of a step when it is launched, while the step before it has not begun."""

    def launch(self, work: Work, copies: Work | None = None) -> LaunchedWork:
        if copies is not None:
            copies()
        return super().launch(work)


def test_copies_may_be_made_beside_the_step_before(checkpoints: dict[str, Path]) -> None:
    model = LLM(str(checkpoints["qwen2"]), replace(SCARCE, swap_space_bytes=2**22)).model
    runner = ModelRunner(model.runner.decoder, model.runner.kv, model.runner.config, EarlyCopies())
    llm = LLM.of(model, runner)
    found = outputs(llm, GREEDY)
    assert outputs(llm, GREEDY) == found == oracle("qwen2", found)
    assert llm.scheduler.counters.swapped_in > 0


def test_nobody_is_given_up_for_others(checkpoints: dict[str, Path]) -> None:
    model = LLM(str(checkpoints["qwen2"]), SCARCE).model
    strict = replace(model, engine_config=replace(model.engine_config, max_preemptions=0))
    found = outputs(LLM.of(strict, model.runner), GREEDY)
    assert found == oracle("qwen2", found)


class ScarceExecutor:
    """Has no memory for one step in five."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.runs_ahead = executor.runs_ahead
        self._launches = 0

    def launch(self, batch: Batch) -> PendingStep:
        self._launches += 1
        if self._launches % 5 == 0:
            raise MemoryExhausted("no memory for this step")
        return self._executor.launch(batch)


def test_a_step_without_memory_does_not_change_a_token(checkpoints: dict[str, Path]) -> None:
    model = LLM(str(checkpoints["qwen2"]), SHAPES["chunked"]).model
    llm = LLM.of(model, ScarceExecutor(model.runner))
    found = outputs(llm, GREEDY)
    assert found == oracle("qwen2", found)
    assert llm.scheduler.counters.lost_steps > 10


def test_nor_does_one_that_was_to_swap_blocks(checkpoints: dict[str, Path]) -> None:
    model = LLM(str(checkpoints["qwen2"]), replace(SCARCE, swap_space_bytes=2**22)).model
    llm = LLM.of(model, ScarceExecutor(model.runner))
    found = outputs(llm, GREEDY)
    assert outputs(llm, GREEDY) == found == oracle("qwen2", found)
    counters = llm.scheduler.counters
    assert counters.lost_steps > 10 and counters.swapped_in > 0


def test_the_same_seed_draws_the_same_text_in_any_batch(checkpoints: dict[str, Path]) -> None:
    texts = [outputs(LLM(str(checkpoints["llama3-scaling"]), shape), DRAWN) for shape in SHAPES.values()]
    assert all(text == texts[0] for text in texts)


def test_penalties_and_minimum_lengths_survive_preemption(checkpoints: dict[str, Path]) -> None:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=40, stop_token_ids=(7, 9), min_tokens=20, **penalties)
    roomy = LLM(str(checkpoints["qwen2"]), SHAPES["alone"])
    squeezed = LLM(str(checkpoints["qwen2"]), SCARCE)
    assert outputs(squeezed, sampling) == outputs(roomy, sampling)
    assert squeezed.scheduler.counters.preemptions > 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([[1], [1, 131]], "prompt 1 must hold token ids between 0 and 130, got 131"),
        ([[-1]], "prompt 0 must hold token ids between 0 and 130, got -1"),
        ([[2**70]], "prompt 0 must hold token ids .*, got 1180591620717411303424"),
        ([[1.0]], r"got 1\.0"),
        ([[]], "prompt 0 has 0 tokens"),
        ([1, 2], "prompt 0 is of type int; a text, a list of token ids or a list of messages is expected"),
        ([torch.tensor([1, 2])], "prompt 0 is of type Tensor; a text"),
        ([{"role": "user", "content": "w1"}], "prompt 0 is of type dict; a text"),
        ("w1 w2", "prompts is one text; a list of prompts is expected"),
        ([[1], [1] * 45], "prompt 1 has 45 tokens"),
        ([[{"role": "user", "content": "a\ud881"}]], "prompt 0 is not valid Unicode: it holds a lone surrogate"),
    ],
)
def test_a_malformed_or_too_long_prompt_is_refused_before_anything_runs(
    checkpoints: dict[str, Path], asked: Any, message: str
) -> None:
    llm = LLM(str(checkpoints["qwen2"]), EngineOptions(max_model_len=50))
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.generate(asked, SamplingParams(max_tokens=10), progress=False)
    assert caught.value.param == "prompts"
    assert not llm.scheduler.has_work


def test_stop_tokens_outside_the_vocabulary_are_refused(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), EngineOptions(max_model_len=50))
    with pytest.raises(InvalidRequest, match="stop_token_ids must hold token ids between 0 and 130, got 131"):
        llm.generate([[1]], SamplingParams(max_tokens=10, min_tokens=5, stop_token_ids=(131,)), progress=False)


def test_token_ids_alone_are_those_of_the_text(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), EngineOptions(max_model_len=50))
    prompts = [[1, 2, 3], [4]]
    sampling = SamplingParams(temperature=0, max_tokens=9)
    with_text = llm.generate(prompts, sampling, progress=False)
    assert any(each.text for each in with_text)
    alone = llm.generate(prompts, sampling, progress=False, detokenize=False)
    assert alone == [replace(each, text="") for each in with_text]


def test_a_stop_string_without_text_is_refused(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), EngineOptions(max_model_len=50))
    with pytest.raises(InvalidRequest, match="stop strings are looked for in text") as caught:
        llm.generate([[1]], SamplingParams(max_tokens=3, stop=("a",)), progress=False, detokenize=False)
    assert caught.value.param == "stop"
    assert not llm.scheduler.has_work


class InterruptedExecutor:
    """Interrupts the wait for its fifth step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.runs_ahead = executor.runs_ahead
        self._launches = 0

    def launch(self, batch: Batch) -> PendingStep:
        self._launches += 1
        step = self._executor.launch(batch)
        return InterruptedStep(step) if self._launches == 5 else step


class InterruptedStep:
    def __init__(self, step: PendingStep) -> None:
        self._step = step
        self._interrupted = False

    def wait(self) -> StepOutput:
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return self._step.wait()


def test_a_generation_that_was_interrupted_leaves_nothing_to_the_next(checkpoints: dict[str, Path]) -> None:
    model = LLM(str(checkpoints["qwen2"]), SHAPES["chunked"]).model
    llm = LLM.of(model, InterruptedExecutor(model.runner))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), GREEDY, progress=False)
    found = outputs(llm, GREEDY)
    assert found == oracle("qwen2", found)


LAUNCHING = ("backend.worker.staging", "backend.worker.model_runner", "backend.llm", "backend.worker.device_stream")


class Interrupt:
    """Raises KeyboardInterrupt, as a signal does, before the n-th line of what launches steps and waits for them."""

    def __init__(self, line: int) -> None:
        self._lines = line

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter_function)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_function(self, frame: FrameType, event: str, _: object) -> Any:
        return self._pass_line if frame.f_globals["__name__"] in LAUNCHING else None

    def _pass_line(self, frame: FrameType, event: str, _: object) -> Any:
        self._lines -= event == "line"
        if self._lines == 0:
            raise KeyboardInterrupt
        return self._pass_line


def test_a_generation_may_be_interrupted_anywhere(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), SHAPES["chunked"])
    short, sampling = prompts()[:3], replace(GREEDY, max_tokens=2)
    expected = [one.token_ids for one in llm.generate(short, sampling, progress=False)]
    assert expected == oracle("qwen2", expected, num_tokens=2)
    for line in range(1, 240, 5):
        with pytest.raises(KeyboardInterrupt), Interrupt(line):
            llm.generate(short, sampling, progress=False)
        assert [one.token_ids for one in llm.generate(short, sampling, progress=False)] == expected, line


def test_memory_that_cannot_hold_one_sequence_is_refused_with_the_arithmetic(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"needs 4 blocks = .* lower max_model_len to 48"):
        LLM(str(checkpoints["qwen2"]), EngineOptions(max_model_len=50, kv_memory_bytes=3 * 12_288))


def test_answers_match_their_grammars_and_those_beside_them_are_unchanged() -> None:
    llm = LLM("embedded", EngineOptions(max_num_seqs=3, max_num_batched_tokens=24, prefill_chunk=7))
    shown = json.dumps(
        {
            "type": "object",
            "properties": {"to": {"enum": [1, 22, 333]}},
            "required": ["to"],
            "additionalProperties": False,
        }
    )
    grammars = [Grammar(GrammarKind.REGEX, r"\d{3}-[a-f]{2}"), None, Grammar(GrammarKind.JSON_SCHEMA, shown)]
    texts = []
    for temperature in (0, 1):
        sampling = [
            SamplingParams(temperature=temperature, seed=7, max_tokens=60, grammar=grammar) for grammar in grammars
        ]
        prompt = [{"role": "user", "content": "Count from 3 to 6."}]
        texts += llm.generate([prompt] * 3 + ["3, 4"], [*sampling, sampling[0]], progress=False)
    for completion in texts[0], texts[3], texts[4], texts[7]:
        assert re.fullmatch(r"\d{3}-[a-f]{2}", completion.text)
    assert texts[1].text == "3, 4, 5, 6"
    assert all(json.loads(completion.text)["to"] in (1, 22, 333) for completion in (texts[2], texts[6]))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        llm.generate(["a"], SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(a")), progress=False)


def test_tokens_behind_a_stop_string_are_not_kept_where_a_step_brings_several() -> None:
    grammar = Grammar(GrammarKind.REGEX, "(red|green): what follows (is said|was told) each time[.!]")
    llm, found = LLM("embedded"), []
    for logprobs in (None, 0):  # with log probabilities no token is taken before it is sampled
        sampling = SamplingParams(temperature=0, max_tokens=60, grammar=grammar, stop=("follows",), logprobs=logprobs)
        (completion,) = llm.generate(["a"], sampling, progress=False)
        found.append((completion.token_ids, completion.text))
    assert found[0] == found[1]


def test_an_answer_that_may_have_no_token_ends_and_says_so() -> None:
    llm = LLM("embedded")
    grammar = Grammar(GrammarKind.CHOICE, '["yes"]')
    whole = SamplingParams(grammar=grammar, min_tokens=9)
    unable = SamplingParams(grammar=grammar, allowed_token_ids=(5,))
    stuck, ended, free = llm.generate(["a", "a", "a"], [unable, whole, GREEDY], progress=False)
    assert stuck.finish_reason == "grammar"
    assert (ended.text, ended.finish_reason) == ("yes", "stop"), "it matches, and nothing else may follow"
    assert len(free.token_ids) == NUM_TOKENS
