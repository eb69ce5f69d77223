import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.core import CoreConfig, MemoryGate, Unit, make_core
from admission.ledger import EngineTimeTariff, TokenTariff
from admission.step_time import StepTime, StepTimeModel, StepWork
from backend.config import EngineConfig
from backend.scheduler.batch import Batch
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128)


def served(unit: Unit, seconds: float) -> list[Sequence]:
    """Three sequences of two tenants to their ends, each step taking `seconds`."""
    config = CoreConfig(unit=unit, quantum=0.05 if unit is Unit.ENGINE_TIME else 512)
    machine = ClockedCore(make_core(config, ENGINE), lambda step: seconds)
    sequences = [machine.add(make_sequence(f"{n}", f"t{n % 2}", 9 + n, 5)) for n in range(3)]
    machine.drain()
    return sequences


@pytest.mark.parametrize("seconds", [0.0005, 0.04])
def test_what_sequences_are_charged_adds_up_to_the_time_that_the_device_was_busy(seconds: float) -> None:
    sequences = served(Unit.ENGINE_TIME, seconds)
    assert sum(sequence.charged for sequence in sequences) == pytest.approx(5 * seconds)
    assert all(sequence.charged > 0 for sequence in sequences)


def test_in_tokens_a_sequence_is_charged_its_prompt_once_and_each_generated_token_twice() -> None:
    assert [sequence.charged for sequence in served(Unit.TOKENS, 0.01)] == [9 + 10, 10 + 10, 11 + 10]


@pytest.mark.parametrize("prefill_chunk", [3, 16])
def test_in_tokens_nobody_is_charged_for_what_a_preemption_has_computed_again(prefill_chunk: int) -> None:
    """However often: also those who are preempted again before they have come as far as they had been."""
    engine = EngineConfig(12, 48, 4, 4, 16, prefill_chunk=prefill_chunk)
    core = make_core(
        CoreConfig(unit=Unit.TOKENS, quantum=512, memory=MemoryGate.OPTIMISTIC, overtaking_seconds=0), engine
    )
    machine = ClockedCore(core, lambda step: 0.01)
    sequences = [machine.add(make_sequence(f"{n}", f"t{n % 2}", 9 + n, 30)) for n in range(8)]
    machine.drain()
    counters = machine.scheduler.counters
    assert counters.preemptions > 3 and counters.recomputed_tokens > 30
    for one in sequences:
        again = one.charged - len(one.prompt) - 2 * len(one.output)
        assert 0 <= again <= 2 * one.num_preemptions, "a token that a step in flight drew is drawn once more"
    assert max(one.num_preemptions for one in sequences) > 1


def test_no_request_is_expected_to_cost_more_than_in_steps_of_its_own() -> None:
    """Also where a fit found that steps take their time whatever they do, and the next that they do not."""
    model = StepTimeModel(StepTime((0.002, 0.0, 1e-15, 0.0, 0.0, 0.0, 0.0)))
    tariff = EngineTimeTariff(model)
    decodes = Batch(0, 2, [0, 1], [5, 5], [1, 1], [], [0, 1])
    work = StepWork(decode_tokens=2, decode_context=12)
    for _ in range(50):
        assert sum(tariff.costs(ScheduledStep(decodes), model.fitted.seconds(work))) == pytest.approx(0.002)
    model.fitted = StepTime((0.001, 4e-5, 4e-5, 3e-7, 0.0, 0.0, 0.0))
    assert tariff.estimate(7, 24) <= 0.001 * 25 + 4e-5 * 31 + 3e-7 * 24 * 31
    for _ in range(400):
        tariff.costs(ScheduledStep(decodes), model.fitted.seconds(work))
    assert 0.012 < tariff.estimate(7, 24) < 0.02, "two decode in each step"


@given(st.integers(1, 4000), st.integers(0, 4000), st.floats(0, 2000))
def test_what_is_cached_of_a_prompt_is_not_prepaid(prompt: int, cached: int, output: float) -> None:
    cached = min(cached, prompt - 1)
    tariff = EngineTimeTariff(StepTimeModel(StepTime((0.001, 4e-5, 4e-5, 3e-7, 1e-7, 1e-9, 0.0))))
    assert tariff.estimate(prompt, output, cached) <= tariff.estimate(prompt, output)
    assert TokenTariff().estimate(prompt, output, cached) + cached == pytest.approx(
        TokenTariff().estimate(prompt, output)
    )
