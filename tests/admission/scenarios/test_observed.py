"""To watch a core is not to change it."""

from random import Random

import pytest

from admission.controller import Controller
from admission.core import PRIOR, CoreConfig, make_core
from admission.event_log import make_logged_core
from admission.step_time import StepTimeModel
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import FinishReason, Sequence

ENGINE = EngineConfig(
    num_blocks=20, max_model_len=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=12
)
CONFIG = CoreConfig(quantum=0.01)


def decisions(core: Controller, seed: int) -> list[Batch | None]:
    """Every plan of a run that is the same for all cores."""
    random, plans = Random(seed), list[Batch | None]()
    live: list[Sequence] = []
    for n in range(300):
        if random.random() < 0.4:
            prompt, output = random.randint(1, 30), random.randint(1, 20)
            sequence = Sequence(f"r{n}", f"t{n % 3}", [0] * prompt, SamplingParams(), output, 0, frozenset())
            sequence.priority_class = random.randrange(2)
            core.arrive(sequence, float(n))
            live.append(sequence)
        if live and random.random() < 0.1:
            core.finish(live[random.randrange(len(live))], FinishReason.CANCELLED, float(n))
        plans.append(core.schedule(float(n)))
        core.take_ended()
        if core.scheduler.in_flight and random.random() < 0.7:
            scheduled = core.scheduler.in_flight[0]
            elapsed = random.uniform(0.001, 0.02)
            core.update_from_output(StepOutput(scheduled.batch.step, [0] * len(scheduled.sampled), elapsed), float(n))
    return plans


@pytest.mark.parametrize("seed", range(10))
def test_recording_a_core_changes_no_decision(seed: int) -> None:
    recorded = make_logged_core(CONFIG, ENGINE, StepTimeModel(PRIOR), lambda line: None)[0]
    assert decisions(recorded, seed) == decisions(make_core(CONFIG, ENGINE, StepTimeModel(PRIOR)), seed)
