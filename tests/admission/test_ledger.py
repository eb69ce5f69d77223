import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.core import CoreConfig, make_core
from admission.ledger import EngineTimeTariff, work_of
from admission.promise import Promise
from admission.step_times.idle_calibration import work_of_shape
from admission.step_times.step_time import StepTime, StepTimeModel, StepWork
from backend.calibration_steps import calibration_series
from backend.config import EngineConfig
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128)


def served(seconds: float) -> list[Promise]:
    """What three sequences of two tenants were charged to their ends, each step taking `seconds`."""
    machine = ClockedCore(make_core(CoreConfig(), ENGINE), lambda step: seconds)
    sequences = [machine.add(make_sequence(f"{n}", f"t{n % 2}", 9 + n, 5)) for n in range(3)]
    promises = [machine.core.ledger.promises[sequence] for sequence in sequences]
    machine.drain()
    return promises


@pytest.mark.parametrize("seconds", [0.0005, 0.04])
def test_charges_of_sequences_add_up_to_the_busy_time_of_the_device(seconds: float) -> None:
    promises = served(seconds)
    assert sum(promise.charged for promise in promises) == pytest.approx(5 * seconds)
    assert all(promise.charged > 0 for promise in promises)


@pytest.mark.parametrize("seconds", [0.0005, 0.04])
def test_tenants_are_charged_the_time_of_completed_steps_when_those_behind_are_lost(seconds: float) -> None:
    core = make_core(CoreConfig(), ENGINE)
    for n in range(3):
        core.arrive(make_sequence(f"{n}", f"t{n % 2}", 9 + n, 20), 0.0)
    core.schedule(0.0)
    core.schedule(0.0)
    tokens = [5 for _ in core.in_flight[0].batch.sampled]
    core.update_from_output(StepOutput(0, tokens, seconds), seconds)
    assert len(core.in_flight) == 1
    core.rollback(seconds)
    assert sum(account.charged for account in core.share.accounts.values()) == pytest.approx(seconds)


def test_no_request_is_expected_to_cost_more_than_in_steps_of_its_own() -> None:
    """Also where a fit found only a fixed time of steps, and the next fit one that grows with their work."""
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
def test_cached_prompt_tokens_are_not_prepaid(prompt: int, cached: int, output: float) -> None:
    cached = min(cached, prompt - 1)
    tariff = EngineTimeTariff(StepTimeModel(StepTime((0.001, 4e-5, 4e-5, 3e-7, 1e-7, 1e-9, 0.0))))
    assert tariff.estimate(prompt, output, cached) <= tariff.estimate(prompt, output)


KNEE = StepTime((0.01, 1e-4, 2e-4, 1e-6, 0.0, 0.0, 3e-4), 8)


def knee_tariff() -> EngineTimeTariff:
    """Of a device whose steps turn dearer at 8 tokens, which calibration has found out."""
    model = StepTimeModel(KNEE)
    works = [StepWork(count, 0, 0, 0, 0) for count in range(1, 40)] + [StepWork(0, n, 16 * n) for n in range(1, 40)]
    works += [StepWork(0, n, 1600 * n) for n in range(1, 40)]
    model.calibrate([(work, KNEE.seconds(work)) for work in works])
    assert abs(model.fitted.knee - 8) <= 1
    return EngineTimeTariff(model)


def test_step_time_beyond_the_knee_is_divided_among_all_tokens() -> None:
    """Twelve decodes and a chunk of twelve tokens: a token of either passes the knee with the others."""
    tariff = knee_tariff()
    starts, lengths = [0] * 12 + [0], [1] * 12 + [12]
    step = ScheduledStep(Batch(0, 12, list(range(13)), starts, lengths, [0] * 12, list(range(12))))
    each = 3e-4 * (24 - 8) / 24
    costs = tariff.costs(step, 1.0)
    assert costs[12] / costs[0] == pytest.approx(12 * (1e-4 + each) / (2e-4 + 1e-6 + each), rel=0.03)
    assert sum(costs) == pytest.approx(1.0)


@pytest.mark.parametrize("has_knee", [False, True])
def test_a_row_with_a_draft_costs_what_its_work_takes(has_knee: bool) -> None:
    """Beside ten decodes, sixteen tokens behind a hundred: all are decoded, and attend as a prompt does."""
    tariff = knee_tariff() if has_knee else EngineTimeTariff(StepTimeModel(KNEE))
    row = make_sequence("drafted", "t", 100, 50)
    batch = Batch(0, 10, list(range(11)), [100] * 11, [1] * 10 + [16])
    others = [make_sequence(f"{n}", "t", 100, 50) for n in range(10)]
    step = ScheduledStep(batch, sequences=[*others, row], decode_context=1010, drafts={row: 15})
    _, _, decode, context, read, pairs, beyond = tariff.model.fitted.coefficients
    each = beyond * (1 - tariff.model.fitted.knee / 26) if has_knee else 0.0
    drafted = 16 * (decode + each) + read * 100 + pairs * sum(range(101, 117))
    costs = tariff.costs(step, 1.0)
    assert costs[-1] / costs[0] == pytest.approx(drafted / (decode + each + 101 * context))
    assert sum(costs) == pytest.approx(1.0)


def test_a_draft_is_priced_as_its_step_is_counted() -> None:
    hooks = make_core(CoreConfig(), ENGINE, StepTimeModel(KNEE)).scheduler.hooks
    row, other = make_sequence("drafted", "t", 100, 50), make_sequence("other", "t", 40, 50)
    batch = Batch(0, 1, [0, 1], [39, 99], [1, 6])
    step = ScheduledStep(batch, sequences=[other, row], decode_context=40, drafts={row: 5})
    priced = hooks.decode_seconds(1 + 6, 40 + 105) + hooks.draft_seconds(99, 6)
    assert priced == pytest.approx(KNEE.seconds(work_of(step)))


def test_a_request_beyond_the_knee_is_expected_to_cost_what_its_tokens_are_charged() -> None:
    tariff = knee_tariff()
    step = ScheduledStep(Batch(0, 12, list(range(12)), [9] * 12, [1] * 12, [], list(range(12))))
    for _ in range(400):
        costs = tariff.costs(step, KNEE.seconds(StepWork(0, 12, 120)))
    assert tariff.estimate(1, 10) == pytest.approx(11 * costs[0], rel=0.2)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_sequence_that_leaves_is_charged_for_its_steps_in_flight_too(steps: int) -> None:
    """The device's time is divided by its own prices, to which the ledger's are calibrated."""
    true = StepTime((0.004, 1e-4, 2e-4, 1e-6, 1e-6, 0.0, 0.0))
    model = StepTimeModel(true)
    works = [work_of_shape(step) for series in calibration_series(ENGINE) for step in series]
    model.calibrate([(work, true.seconds(work)) for work in works])
    took: dict[str, float] = {"leaves": 0.0, "stays": 0.0}

    def seconds(step: ScheduledStep) -> float:
        batch = step.batch
        parts = [
            true.of_prefill(start, length) if row >= batch.num_decodes else 2e-4 + 1e-6 * (start + 1)
            for row, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True))
        ]
        elapsed = 1.3 * true.seconds(work_of(step))
        for sequence, part in zip(step.sequences, parts, strict=True):
            took[sequence.tenant] += elapsed * part / sum(parts)
        return elapsed

    core = make_core(CoreConfig(), ENGINE, model)
    machine = ClockedCore(core, seconds)
    leaver = machine.add(make_sequence("leaver", "leaves", 60, 40))
    machine.add(make_sequence("other", "stays", 10, 40))
    machine.steps(steps)
    machine.plan()
    assert len(core.in_flight) == 2 and leaver in core.in_flight[-1].sequences
    machine.finish(leaver)
    machine.drain()
    for tenant, seconds_taken in took.items():
        assert core.share.account(tenant).charged == pytest.approx(seconds_taken, rel=0.01)
    apart = core.credit("leaves") - core.credit("stays")
    assert apart == pytest.approx(took["stays"] - took["leaves"], abs=0.06), "nothing of it is given back"
    assert not core.ledger.promises
