"""The runner that every device shares: padding for graphs, memory that is staged and used again, and failures."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.calibration_steps import CalibrationStep
from backend.config import EngineConfig
from backend.errors import DeviceError, MemoryExhausted
from backend.kernels.ops import StepInputs
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NO_TOKEN, Batch, NewSequence
from backend.worker import graph_shapes
from backend.worker.device_stream import CpuStream, LaunchedWork, Work
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from tests.backend.runners import CONFIG, MODEL, EagerGraphStream, PaddedOps, generate, make_runner

PROMPTS = [[(7 * n + k) % 97 for k in range(1 + 5 * n % 17)] for n in range(14)]
KINDS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(max_tokens=14),
    SamplingParams(temperature=0.8, top_p=0.8, top_k=20, max_tokens=6, repetition_penalty=1.4),
    SamplingParams(temperature=0, min_tokens=6, stop_token_ids=(5, 9), presence_penalty=1, max_tokens=12),
]
SAMPLING = [KINDS[n % len(KINDS)] for n in range(len(PROMPTS))]


def prompt_step(number: int = 0, slot: int = 0, tokens: Sequence[int] = (1,)) -> Batch:
    """A whole prompt, in the block that has the number of its slot."""
    admitted = NewSequence(slot, SamplingParams(temperature=0), 0, list(tokens), len(tokens))
    return Batch(number, 0, [slot], [0], [len(tokens)], list(tokens), [0], [(slot, 0, [slot])], [admitted])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each prompt by itself, one step at a time."""
    alone = replace(CONFIG, max_num_seqs=1, steps_in_flight=1)
    return generate(make_runner(config=alone), PROMPTS, SAMPLING)


@pytest.fixture
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sizes within the limits of a small engine, and steps that none of them holds."""
    monkeypatch.setattr(graph_shapes, "MAX_PROMPTS", 3)
    monkeypatch.setattr(graph_shapes, "MIN_DECODE_PLACES", 4)
    monkeypatch.setattr(graph_shapes, "TOKENS_STEP", 8)


def test_a_sequence_whose_logits_are_no_numbers_has_no_token_and_those_beside_it_have_theirs() -> None:
    runner = make_runner()
    (token,) = runner.launch(prompt_step(tokens=(3, 4))).wait().token_ids
    runner.decoder.embedding[9] = torch.nan
    admitted = [NewSequence(slot, SamplingParams(), 7, tokens, 2) for slot, tokens in enumerate(([3, 9], [3, 4]))]
    admitted[1] = replace(admitted[1], sampling=SamplingParams(temperature=0))
    both = Batch(1, 0, [0, 1], [0, 0], [2, 2], [3, 9, 3, 4], [0, 1], [(0, 0, [0]), (1, 0, [1])], admitted)
    assert runner.launch(both).wait().token_ids == [NO_TOKEN, token]
    decodes = Batch(2, 2, [0, 1], [2, 2], [1, 1], [], [0, 1])
    broken, token = runner.launch(decodes).wait().token_ids
    assert broken == NO_TOKEN, "what it is fed is some token, and its memory has the rest"
    assert 0 <= token < 97


def warmed_up(config: EngineConfig = CONFIG) -> tuple[ModelRunner, EagerGraphStream]:
    """A runner with its graphs, and the stream that knows of their replays."""
    stream = EagerGraphStream()
    runner = make_runner(device_stream=stream, config=config)
    runner.warm_up()
    return runner, stream


def replays(stream: EagerGraphStream, prompts: bool) -> list[int]:
    """How often each graph of steps with prompts, or of decodes alone, was replayed once recorded; largest first."""
    return [graph.replays for graph in stream.graphs if (graph.shape.num_prompts > 0) == prompts]


def test_warming_up_replays_all_graphs_and_samples_from_the_smallest_and_in_every_slot() -> None:
    _, stream = warmed_up()
    decodes, prompts = replays(stream, prompts=False), replays(stream, prompts=True)
    assert min(decodes + prompts) == 0, "a graph was not replayed when it was recorded"
    assert decodes[0] and decodes[-1] and sum(map(bool, decodes)) == 2
    assert prompts[-1] and sum(map(bool, prompts)) == 1


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_an_engine_of_few_tokens_a_step_has_graphs_of_as_many(expected: list[list[int]], tokens: int) -> None:
    config = replace(CONFIG, max_num_seqs=min(tokens, 4), max_num_batched_tokens=tokens, prefill_chunk=tokens)
    runner, stream = warmed_up(config)
    assert max(graph.shape.num_tokens for graph in stream.graphs) == tokens
    assert generate(runner, PROMPTS, SAMPLING) == expected


@pytest.mark.usefixtures("small_graphs")
@pytest.mark.parametrize("at_once", [1, 3, 14])
def test_a_padded_step_computes_what_the_batch_alone_does(expected: list[list[int]], at_once: int) -> None:
    runner, stream = warmed_up()
    for graph in stream.graphs:
        graph.replays = 0
    assert generate(runner, PROMPTS, SAMPLING, at_once) == expected
    assert sum(map(bool, replays(stream, prompts=True))) >= 4
    assert sum(map(bool, replays(stream, prompts=False))) >= 4


def watch(runner: ModelRunner) -> list[Batch]:
    """The batches that it is given from now on."""
    batches: list[Batch] = []
    launch = runner.launch

    def launch_watched(batch: Batch) -> PendingStep:
        batches.append(batch)
        return launch(batch)

    runner.launch = launch_watched  # type: ignore[method-assign, assignment]
    return batches


@pytest.mark.usefixtures("small_graphs")
def test_sequences_that_are_computed_again_in_padded_steps_go_on_as_they_were(expected: list[list[int]]) -> None:
    runner, stream = warmed_up(replace(CONFIG, num_blocks=16))
    batches = watch(runner)
    assert generate(runner, PROMPTS, SAMPLING, at_once=5) == expected
    assert sum(len(batch.admitted) for batch in batches) > len(PROMPTS), "nothing was preempted"
    assert sum(replays(stream, prompts=True)) > 8


@pytest.mark.usefixtures("small_graphs")
@pytest.mark.parametrize("has_graphs", [False, True])
def test_groups_of_layers_with_a_window_read_tables_of_their_own_that_begin_where_kernels_read(
    has_graphs: bool,
) -> None:
    class Ops(PaddedOps):
        def paged_attention(self, *arguments: Any) -> Tensor:
            step: StepInputs = arguments[3]
            misplaced.update(x for x in (step.slot_mapping, step.block_tables) if x.data_ptr() % 16)
            return super().paged_attention(*arguments)

    misplaced = set[Tensor]()
    windowed = replace(MODEL, num_layers=3, sliding_window=6, full_attention_layers=frozenset({1}))
    config = replace(CONFIG, num_blocks=90, max_num_seqs=9, max_num_batched_tokens=27, max_model_len=52)
    in_groups = replace(config, window_groups=2, window_tokens=6)
    runners = [
        make_runner(Ops(), EagerGraphStream() if has_graphs else None, one, model=windowed)
        for one in (config, in_groups)
    ]
    for runner in runners if has_graphs else ():
        runner.warm_up()
    whole, grouped = [generate(runner, PROMPTS, SAMPLING, at_once=3) for runner in runners]
    assert whole == grouped and not misplaced


@pytest.mark.usefixtures("small_graphs")
def test_random_mixes_of_chunks_and_decodes_are_those_of_an_engine_without_graphs() -> None:
    generator = random.Random(5)
    config = replace(CONFIG, max_num_seqs=8, max_num_batched_tokens=40, prefill_chunk=11)
    held, sampled = set(), set()
    for _ in range(4):
        prompts = [[generator.randrange(97) for _ in range(generator.randint(1, 45))] for _ in range(12)]
        (runner, stream), at_once = warmed_up(config), generator.randint(1, 5)
        batches = watch(runner)
        found = generate(runner, prompts, SAMPLING[: len(prompts)], at_once)
        assert found == generate(make_runner(config=config), prompts, SAMPLING[: len(prompts)], at_once)
        assert runner.graphs is not None
        held |= {runner.graphs.shape_for(batch) is not None for batch in batches}
        sampled |= {bool(batch.sampled) for batch in batches}
        assert sum(replays(stream, prompts=True)) > 8
    assert held == sampled == {True, False}, "one kind of step did not occur"


class WatchedStream(EagerGraphStream):
    """Knows the threads that launched."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def launch(self, work: Work, copies: Work | None = None) -> LaunchedWork:
        self.threads.add(threading.current_thread())
        return super().launch(work, copies)


def test_a_device_is_warmed_up_by_a_thread_that_ends() -> None:
    stream = WatchedStream()
    make_runner(device_stream=stream).warm_up()
    assert len(stream.threads) == 1
    assert not any(thread.is_alive() for thread in stream.threads)


def check_written(runner: ModelRunner, before: torch.Tensor, *places: tuple[int, int]) -> None:
    """These offsets of blocks were written since, and no other but those of the spare block."""
    for block, offset in places:
        assert not torch.equal(runner.kv.blocks[block, ..., offset, :], before[block, ..., offset, :])
        before[block, ..., offset, :] = runner.kv.blocks[block, ..., offset, :]
    before[-1] = runner.kv.blocks[-1]
    assert torch.equal(runner.kv.blocks, before)


def test_padding_reads_and_writes_nobodys_memory() -> None:
    runner, _ = warmed_up()
    for slot in range(5):
        runner.launch(prompt_step(slot=slot, tokens=(5, 6))).wait()
    before = runner.kv.blocks.clone()
    five = list(range(5))
    tokens = runner.launch(Batch(1, 5, five, [2] * 5, [1] * 5, [], five)).wait().token_ids
    assert len(set(tokens)) == 1, "the same context in every slot"
    check_written(runner, before, *((block, 2) for block in five))


def test_padding_beside_prompts_reads_and_writes_nobodys_memory() -> None:
    runner, stream = warmed_up()
    for slot in range(3):
        runner.launch(prompt_step(slot=slot, tokens=(5, 6))).wait()
    before, replayed = runner.kv.blocks.clone(), sum(replays(stream, prompts=True))
    tables, admitted = [(3, 0, [3])], [NewSequence(3, SamplingParams(temperature=0), 0, [5, 6], 2)]
    mixed = Batch(1, 2, [0, 2, 3], [2, 2, 0], [1, 1, 2], [5, 6], [0, 1, 2], tables, admitted)
    first, second, third = runner.launch(mixed).wait().token_ids
    assert sum(replays(stream, prompts=True)) == replayed + 1
    assert first == second, "the same context in both slots"
    assert [third] == runner.launch(prompt_step(2, slot=4, tokens=(5, 6))).wait().token_ids
    check_written(runner, before, (0, 2), (2, 2), (3, 0), (3, 1), (4, 0), (4, 1))


@pytest.mark.usefixtures("small_graphs")
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("num_answers", [2, 4, 11])
def test_answers_that_are_forked_are_those_to_prompts_of_their_own(num_answers: int, has_graphs: bool) -> None:
    """Of any sampling. Where more answers are forked than a small graph has places, it is a larger one or none."""
    prompt, slots = [5, 6, 7, 8, 9, 10], list(range(num_answers))
    admitted = [NewSequence(slot, KINDS[slot % len(KINDS)], 40 + slot, prompt, len(prompt)) for slot in slots]

    def go_on(runner: ModelRunner, tokens: list[int]) -> list[list[int]]:
        """What follows the first tokens."""
        found, sampled = [tokens], slots
        for step, position in enumerate(range(6, 10), num_answers):
            blocks = [(slot, 2, [22 + slot]) for slot in slots if position == 8]
            found.append(
                runner.launch(
                    Batch(step, num_answers, slots, [position] * num_answers, [1] * num_answers, [], sampled, blocks)
                )
                .wait()
                .token_ids
            )
        return found

    alone, first = make_runner(), []
    for slot in slots:
        tables = [(slot, 0, [2 * slot, 2 * slot + 1])]
        first += alone.launch(Batch(slot, 0, [slot], [0], [6], prompt, [0], tables, [admitted[slot]])).wait().token_ids
    runner = warmed_up()[0] if has_graphs else make_runner()
    tables = [(slot, 0, [0, 1 + slot]) for slot in slots]
    forks = Batch(0, 0, [0], [0], [6], prompt, [0] * num_answers, tables, admitted)
    forks.forks, forks.block_copies = [(slot, slot) for slot in slots[1:]], [(1, 1 + slot) for slot in slots[1:]]
    tokens = runner.launch(forks).wait().token_ids
    assert go_on(runner, tokens) == go_on(alone, first)


class CountingStream(CpuStream):
    """Remembers the host memory that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: list[torch.Tensor] = []

    def staging(self, num_bytes: int) -> torch.Tensor:
        self.staged.append(super().staging(num_bytes))
        return self.staged[-1]


def test_two_steps_in_flight_stage_in_memory_of_their_own_and_use_it_again(expected: list[list[int]]) -> None:
    stream = CountingStream()
    runner = make_runner(device_stream=stream)
    released = runner.stager.release

    def release_and_overwrite(staged: object) -> None:
        """Overwrite the staged arrays: a late reader, or a kept view, reads nonsense."""
        released(staged)  # type: ignore[arg-type]
        staged.piece.memory.fill_(111)  # type: ignore[attr-defined]
        staged.piece.tokens.fill_(-5)  # type: ignore[attr-defined]

    runner.stager.release = release_and_overwrite  # type: ignore[method-assign]
    assert generate(runner, PROMPTS, SAMPLING, at_once=2) == expected
    assert len(stream.staged) == 2 * CONFIG.steps_in_flight, "memory was taken after the start"


def test_a_third_step_in_flight_is_a_bug() -> None:
    runner = make_runner()
    running = [runner.launch(prompt_step(number)) for number in range(2)]
    with pytest.raises(AssertionError, match="more steps are in flight"):
        runner.launch(prompt_step(2))
    for step in running:
        step.wait()
    runner.launch(prompt_step(2)).wait()


def test_a_place_in_a_table_that_changes_hands_within_a_plan_ends_with_the_last_block() -> None:
    runner = make_runner()
    changes = [(0, 0, [7, 8]), (0, 0, [9]), (0, 1, [11])]
    runner.launch(replace(prompt_step(tokens=[1] * 5), new_blocks=changes)).wait()
    written = runner.kv.blocks.abs().sum((1, 2, 3, 4, 5)).nonzero().flatten().tolist()
    assert written == [9, 11]


class FailingStream(EagerGraphStream):
    """Every so often a step fails as CUDA's do: when it is launched, or later, when it is waited for."""

    def __init__(self, error: RuntimeError, every: int, at_once: bool) -> None:
        super().__init__()
        self.error, self.every, self.at_once = error, every, at_once
        self.launched = self.recovered = 0

    def launch(self, work: Work, copies: Work | None = None) -> LaunchedWork:
        self.launched += 1
        if self.launched % self.every:
            return super().launch(work, copies)
        if self.at_once:
            self._fail()
        return super().launch(self._fail, copies)

    def recover(self) -> None:
        self.recovered += 1

    def _fail(self) -> None:
        raise self.error


@pytest.mark.parametrize("at_once", [True, False])
def test_an_error_of_cuda_becomes_a_device_error(at_once: bool) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    runner = make_runner(device_stream=FailingStream(error, every=1, at_once=at_once))
    with pytest.raises(DeviceError, match="illegal memory access"):
        runner.launch(prompt_step()).wait()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("captures", [True, False])
def test_a_step_that_finds_no_memory_is_lost_and_nothing_else(
    expected: list[list[int]], captures: bool, at_once: bool
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    stream = FailingStream(error, every=1000, at_once=at_once)
    stream.captures = captures
    runner = make_runner(device_stream=stream)
    runner.warm_up()
    stream.every = 5
    assert generate(runner, PROMPTS, SAMPLING, at_once=3) == expected
    assert stream.recovered > 5
    assert not captures or sum(replays(stream, prompts=True)) > 5


@pytest.mark.parametrize("at_once", [True, False])
def test_a_calibration_step_that_finds_no_memory_leaves_its_own_to_the_steps_behind_it(at_once: bool) -> None:
    stream = FailingStream(torch.OutOfMemoryError("CUDA out of memory"), every=2, at_once=at_once)
    runner = make_runner(device_stream=stream)
    (token,) = runner.launch(prompt_step(5)).wait().token_ids
    with pytest.raises(MemoryExhausted):
        runner.launch(runner.calibration_batch(CalibrationStep(num_prefills=1, length=4))).wait()
    stream.every = 1000
    both = [runner.launch(prompt_step(6 + slot, slot)) for slot in (0, 1)]
    assert [step.wait().token_ids for step in both] == [[token], [token]]


def test_a_cpu_says_in_words_that_it_has_no_memory() -> None:
    class Greedy(CpuStream):
        def launch(self, work: Work, copies: Work | None = None) -> LaunchedWork:
            return super().launch(lambda: torch.empty(1 << 50))

    step = make_runner(device_stream=Greedy()).launch(prompt_step())
    with pytest.raises(MemoryExhausted, match="no memory on cpu for step 0"):
        step.wait()
