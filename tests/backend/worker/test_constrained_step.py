"""Steps with grammars where steps run ahead: the masks of one say what the step before is followed by."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from backend.config import EngineConfig, EngineOptions
from backend.grammar import Grammar, GrammarKind
from backend.llm import LLM
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import StepOutput
from backend.structured_output.masks import ConstrainedRows, Masks
from backend.worker.constrained_step import ConstrainedStep, MaskBuffers
from backend.worker.device_stream import CpuStream
from backend.worker.model_runner import ModelRunner
from tests.backend.runners import AheadStream

CHOICES = Grammar(GrammarKind.REGEX, r"(red|green): what follows (is said|was told) each time[.!]")


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[LLM]:
    llm = LLM("embedded", EngineOptions(max_num_seqs=4))
    yield llm
    assert llm.model.runner.masks is not None
    llm.model.runner.masks.processes.end_all()


def make_ahead(on_cpu: LLM, steps_in_flight: int = 2) -> tuple[LLM, AheadStream]:
    like, stream = on_cpu.model.runner, AheadStream()
    config = replace(like.config, steps_in_flight=steps_in_flight)
    runner = ModelRunner(like.decoder, like.kv, config, stream)
    runner.masks = like.masks
    return LLM.of(replace(on_cpu.model, engine_config=config), runner), stream


def generate(llm: LLM, jumps: bool) -> tuple[list[list[int]], int, int]:
    """Returns the tokens of answers, the steps that they took, and the tokens that were taken with those before."""
    masks = llm.model.runner.masks
    assert masks is not None
    masks.jump_forward = jumps
    steps, jumped = llm.scheduler._next_step, llm.scheduler.counters.jump_forward_tokens
    sampling = [
        SamplingParams(seed=n, max_tokens=60 if n < 2 else 5, grammar=CHOICES if n < 2 else None) for n in range(3)
    ]
    made = [one.token_ids for one in llm.generate(["a", "b", "a"], sampling, progress=False)]
    return made, llm.scheduler._next_step - steps, llm.scheduler.counters.jump_forward_tokens - jumped


def test_with_two_steps_in_flight_forced_tokens_are_known_before_the_step_that_samples_the_first(on_cpu: LLM) -> None:
    ahead, _ = make_ahead(on_cpu)
    plain, one_by_one, _ = generate(on_cpu, jumps=False)
    made, alone, jumped = generate(on_cpu, jumps=True)
    assert made == plain
    assert alone < one_by_one
    made, in_flight, foretold = generate(ahead, jumps=True)
    assert made == plain
    assert foretold > jumped, "the first forced token is taken with those behind it"
    assert alone <= in_flight <= alone + 2 < one_by_one, "the step that was in flight is lost, and no other"
    assert generate(ahead, jumps=False)[0] == plain


def one_after_the_other(llm: LLM) -> list[list[int]]:
    """Returns the tokens of answers of which one ends with every step or two, and another takes its place."""
    either = [Grammar(GrammarKind.REGEX, source) for source in ("[a-f]{30,40}", "[0-9 ]{30,40}")]
    sampling = [SamplingParams(seed=n, max_tokens=2 + n, grammar=either[n % 2]) for n in range(9)]
    return [one.token_ids for one in llm.generate(["a", "b c d", "c"] * 3, sampling, progress=False)]


def test_with_one_step_in_flight_tokens_are_told_to_the_grammars_of_their_own_slots(on_cpu: LLM) -> None:
    """What a step was staged in is the next one's before that asks for its masks."""
    assert one_after_the_other(make_ahead(on_cpu, steps_in_flight=1)[0]) == one_after_the_other(on_cpu)


@pytest.mark.parametrize("lost", range(3, 8))
def test_the_step_in_place_of_a_lost_one_tells_no_grammar_the_tokens_of_another_slot(on_cpu: LLM, lost: int) -> None:
    ahead, stream = make_ahead(on_cpu)
    stream.fails_at = lost
    assert one_after_the_other(ahead) == one_after_the_other(on_cpu)
    assert ahead.scheduler.counters.lost_steps == 1


def test_a_step_that_finds_no_memory_keeps_nobody_waiting_for_its_masks(on_cpu: LLM) -> None:
    ahead, stream = make_ahead(on_cpu)
    expected = generate(on_cpu, jumps=True)[0]
    stream.fails_at = stream.launches + 5
    assert generate(ahead, jumps=True)[0] == expected
    assert ahead.scheduler.counters.lost_steps == 1


def test_masks_that_are_late_are_not_waited_for(on_cpu: LLM) -> None:
    assert on_cpu.model.runner.masks is not None
    rows = ConstrainedRows([(0, 0, 0, 1, 1)], [], may_jump=True)
    step = ConstrainedStep(rows, on_cpu.model.runner.masks, on_cpu.model.runner._mask_buffers, lambda: None)
    output = StepOutput(4, [7], 0.0)
    step.foretell(output, [0], 0.0)
    assert output.forced is None


class PaperGpu(CpuStream):
    """Without memory of its own; the host's is counted."""

    device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.staged: list[torch.Tensor] = []

    def staging(self, num_bytes: int) -> torch.Tensor:
        self.staged.append(super().staging(num_bytes))
        return self.staged[-1]


def test_memory_for_masks_on_their_way_to_a_device_is_there_before_the_first_is_asked_for() -> None:
    """And a piece is written again once as many steps follow as may be in flight, never earlier."""
    gpu = PaperGpu()
    buffers = MaskBuffers(EngineConfig(num_blocks=8, max_model_len=32, max_num_seqs=4, steps_in_flight=2), 70, gpu)
    pieces = len(gpu.staged)
    pointers = []
    for step in range(6):
        masks = Masks({1: 3, 2: 0}, torch.full((4, 3), step, dtype=torch.int32))
        words, rows = buffers.place(masks, 3)
        assert words.device == rows.device == gpu.device
        assert (words.shape, rows.shape) == ((2, 3), (3,))
        written = [piece.view(torch.int32) for piece in gpu.staged if step in piece.view(torch.int32)[:6].tolist()]
        pointers.append(written[0].data_ptr() if step else 0)
    assert len(gpu.staged) == pieces == 4
    assert pointers[2] == pointers[4] != pointers[3] == pointers[5]


def until_no_memory(ahead: LLM, stream: AheadStream) -> None:
    stream.fails_at = stream.launches + 5
    generate(ahead, jumps=True)


def until_interrupted(ahead: LLM, stream: AheadStream) -> None:
    stream.fails_at, stream.failure = stream.launches + 5, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        generate(ahead, jumps=True)


@pytest.mark.parametrize(
    "use",
    [lambda ahead, stream: None, lambda ahead, stream: generate(ahead, jumps=True), until_no_memory, until_interrupted],
)
def test_a_model_that_runs_ahead_is_let_go_with_its_last_step(
    use: Callable[[LLM, AheadStream], object], on_cpu: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The next engine counts on this one's memory, and a garbage collector may not run for minutes."""
    caplog.set_level(logging.CRITICAL, "backend")  # pytest keeps logged errors, and with them all frames that they left
    ahead, stream = make_ahead(on_cpu)
    gc.collect()
    gc.disable()
    try:
        use(ahead, stream)
        runner = weakref.ref(ahead._executor)
        del ahead
        kept_by = [] if runner() is None else gc.get_referrers(runner())
        assert not kept_by
    finally:
        gc.enable()
