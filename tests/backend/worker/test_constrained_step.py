"""Steps with grammars where steps run ahead: the masks of one say what the step before is followed by."""

from collections.abc import Iterator

import pytest

from backend.grammar import Grammar, GrammarKind
from backend.llm import LLM
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import StepOutput
from backend.sizing import EngineOptions
from backend.structured_output.masks import ConstrainedRows
from backend.worker.constrained_step import ConstrainedStep
from backend.worker.device_stream import CpuStream, Deferred, Work
from backend.worker.model_runner import ModelRunner

CHOICES = Grammar(GrammarKind.REGEX, r"(red|green): what follows (is said|was told) each time[.!]")


class AheadStream(CpuStream):
    """A CPU that works when it is told to, as a GPU does, and not when it is waited for."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.fails_at = -1  # launch
        self.launches = 0

    def launch(self, work: Work, copies: Work | None = None) -> Deferred:
        self.launches += 1
        if self.launches == self.fails_at:
            raise MemoryError("a test has taken it")
        super().launch(work, copies).wait()
        return Deferred(self, [], 0)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[LLM]:
    llm = LLM("embedded", EngineOptions(max_num_seqs=4))
    yield llm
    assert llm.model.runner.masks is not None
    llm.model.runner.masks.processes.stop()


def make_ahead(on_cpu: LLM) -> tuple[LLM, AheadStream]:
    like, stream = on_cpu.model.runner, AheadStream()
    runner = ModelRunner(like.decoder, like.kv, like.config, stream)
    runner.masks = like.masks
    return LLM.of(on_cpu.model, runner), stream


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
