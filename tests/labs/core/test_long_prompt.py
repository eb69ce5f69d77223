"""A prompt of 32k tokens beside 64 answers that were promised a rhythm, on a device that only takes time."""

from random import Random
from statistics import median

import pytest

from admission.core import CoreConfig, make_core
from admission.ledger import work_of
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence

INTERVAL = 0.05  # seconds between tokens, promised
ANSWERS, CONTEXT, PROMPT, ANSWER, BUDGET = 64, 1024, 32_768, 1024, 2048
CONFIG = EngineConfig(
    num_blocks=16_384,
    max_model_len=PROMPT + ANSWER,
    max_num_batched_tokens=BUDGET,
    max_num_seqs=ANSWERS + 1,
    prefill_chunk=BUDGET,
)
DEVICES = {  # of an 8B model on an H200, about: memory-bound and compute-bound at once, and up to a knee
    "linear": StepTime((4.5e-3, 2.6e-5, 1e-5, 4e-8, 1e-9, 1.4e-9, 0.0)),
    "hinged": StepTime((6.5e-3, 2e-6, 1e-5, 4e-8, 1e-9, 1.4e-9, 2.4e-5), knee=256),
}


class Machine(ClockedCore):
    """Two steps are in flight; a step's time varies by `noise`, of itself, and is three times as long if it stalls."""

    def __init__(
        self, device: StepTime, noise: float, seed: int, model: StepTimeModel | None = None, stalled: float = 0.0
    ) -> None:
        self._device = device
        self._noise, self._stalled = noise, stalled
        self._random = Random(seed)
        super().__init__(make_core(CoreConfig(), CONFIG, model), self._took)

    def arrive(self, name: str, prompt: int, interval: float | None) -> Sequence:
        return self.add(make_sequence(name, name, prompt, ANSWER, token_interval=interval))

    def arrive_beside_answers(self, tokens: int = 100) -> Sequence:
        """Let the long prompt come when all answers are under way, the last with this many tokens."""
        answers = [self.arrive(str(number), CONTEXT, INTERVAL) for number in range(ANSWERS)]
        while len(answers[-1].output) < tokens:
            self.step()
        return self.arrive("long", PROMPT, None)

    def gaps(self, prompt: Sequence) -> list[float]:
        """Serve until the prompt's first token; returns the seconds between the answers' tokens."""
        found: list[float] = []
        while not prompt.output:
            self.step()
            found.append(self.elapsed)
        return found

    def _took(self, step: ScheduledStep) -> float:
        stall = 3 if self._stalled and self._random.random() < self._stalled else 1
        return self._device.seconds(work_of(step)) * stall * self._random.lognormvariate(0, self._noise)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_the_rhythm_is_kept_and_the_machine_is_used(device: str, noise: float) -> None:
    gaps: list[float] = []
    for seed in range(8):
        machine = Machine(DEVICES[device], noise, seed)
        gaps += machine.gaps(machine.arrive_beside_answers())
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] <= INTERVAL
    assert gaps[len(gaps) // 2] > 0.85 * INTERVAL


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_prompt_of_a_context_that_none_had_is_soon_sized_by_its_own_chunks(device: str) -> None:
    """After 700 steps of decodes the fit knew nothing of such contexts for 64 steps: a third of them were late."""
    machine = Machine(DEVICES[device], 0.01, 0)
    gaps = machine.gaps(machine.arrive_beside_answers(700))
    assert sum(gap > INTERVAL for gap in gaps) <= 0.1 * len(gaps)
    assert max(gaps) <= 1.03 * INTERVAL


def mixed_steps(device: str, stalled: float, model: StepTimeModel | None = None, seed: int = 1) -> list[int]:
    """The tokens of a long prompt that each step carried beside the answers; `stalled`: the share of steps that take
    three times as long as their work does.
    """
    machine = Machine(DEVICES[device], 0.03, seed, model, stalled)
    prompt, carried = machine.arrive_beside_answers(), [0]
    while not prompt.output:
        carried.append(prompt.num_computed_tokens - sum(carried))
        machine.step()
    return [tokens for tokens in carried if tokens]


@pytest.mark.parametrize("device", DEVICES)
def test_stalls_that_no_prefill_caused_do_not_starve_prefill(device: str) -> None:
    """Four in ten steps stalled, as on two cores that others use as well: steps carried a block or two of prefill."""
    seeds = range(1, 4)
    quiet, noisy = ([median(mixed_steps(device, stalled, seed=seed)) for seed in seeds] for stalled in (0.0, 0.4))
    assert median([beside / alone for beside, alone in zip(noisy, quiet, strict=True)]) >= 0.4


def test_a_model_saved_on_a_busy_machine_does_not_starve_the_first_prompts() -> None:
    slower = StepTime(tuple(3 * value for value in DEVICES["linear"].coefficients))  # type: ignore[arg-type]
    saved = StepTimeModel.from_json({"coefficients": slower.coefficients, "knee": slower.knee, "steps": 10_000})
    anew, loaded = (len(mixed_steps("linear", 0.0, model)) for model in (None, saved))
    assert loaded <= 1.1 * anew
