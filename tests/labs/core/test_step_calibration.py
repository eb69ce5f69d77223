from random import Random

import pytest

from admission.core import PRIOR_STEP_TIME
from admission.step_times.idle_calibration import work_of_shape
from admission.step_times.step_calibration import TIMES_PER_SHAPE
from admission.step_times.step_time import StepTime, StepTimeModel, StepWork
from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig
from labs.simulation.device import DEVICES
from tests.examples import examples

NAMES = ("fixed", "prefill", "decode", "decode context", "prefill context", "prefill pairs", "beyond the knee")
SEEN = 0.2  # the share of some step's time, from which a coefficient counts


def engine(budget: int) -> EngineConfig:
    return EngineConfig(27_000, 131_072, max_num_seqs=256, max_num_batched_tokens=budget, prefill_chunk=512)


def shapes(budget: int) -> list[CalibrationStep]:
    return [step for series in calibration_series(engine(budget)) for step in series]


def random_device(random: Random) -> StepTime:
    def between(least: float, most: float) -> float:
        return float(least * (most / least) ** random.random())

    each = [(1e-3, 3e-2), (1e-5, 3e-4), (1e-5, 3e-4), (2e-8, 1e-6), (2e-8, 2e-6), (5e-10, 2e-8)]
    fixed, prefill, decode, context, prefill_context, pairs = (between(*one) for one in each)
    beyond = random.choice((0.0, between(1e-5, 2e-4)))
    return StepTime((fixed, prefill, decode, context, prefill_context, pairs, beyond), int(between(100, 1500)))


def seen(device: StepTime, budget: int, place: int) -> float:
    """Returns the largest share that one coefficient has in the time of a calibration step."""
    shares = []
    for work in map(work_of_shape, shapes(budget)):
        beyond = max(0, work.prefill_tokens + work.decode_tokens - device.knee)
        shares.append(device.coefficients[place] * (1, *work.amounts, beyond)[place] / device.seconds(work))
    return max(shares)


def calibrated(device: StepTime, budget: int, random: Random, noise: float, stalls: float) -> StepTimeModel:
    def took(step: CalibrationStep) -> float:
        stall = random.choice((3, 10)) if random.random() < stalls else 1
        return device.seconds(work_of_shape(step)) * random.gauss(1, noise) * stall

    model = StepTimeModel(PRIOR_STEP_TIME)
    model.calibrate([(work_of_shape(step), took(step)) for step in shapes(budget) for _ in range(TIMES_PER_SHAPE)])
    return model


@pytest.mark.parametrize("budget", [512, 2048])
def test_the_coefficients_of_any_device_are_recovered_from_steps_that_vary_and_stall(budget: int) -> None:
    """Nineteen of twenty coefficients are within 5 % of the truth, of the ones with a fifth of any step's time."""
    errors: dict[str, list[float]] = {name: [] for name in NAMES}
    devices = examples(16, at_night=400)
    for seed in range(devices):
        random = Random(seed)
        device = random_device(random)
        fitted = calibrated(device, budget, random, 0.02, 0.03).fitted
        for place, (name, found, true) in enumerate(zip(NAMES, fitted.coefficients, device.coefficients, strict=True)):
            if true and seen(device, budget, place) > SEEN:
                errors[name].append(abs(found / true - 1))
    assert sum(map(len, errors.values())) > 3.5 * devices
    every = sorted(error for found in errors.values() for error in found)
    assert every[int(0.95 * len(every))] <= 0.05
    assert sum(error > 0.15 for error in every) <= 1 + len(every) // 100


@pytest.mark.parametrize("seed", [101, 102, 103])
def test_a_published_device_is_recovered_within_a_twentieth(seed: int) -> None:
    rates = DEVICES["llama3-8b-a100"].rates
    true = StepTime((14.936e-3, rates.prefill, rates.decode, rates.decode_context, rates.prefill_context, 0.0, 0.0))
    fitted = calibrated(true, 512, Random(seed), 0.02, 0.03).fitted
    found = dict(zip(NAMES, fitted.coefficients, strict=True))
    for name, coefficient in zip(NAMES[:5], true.coefficients, strict=False):
        assert found[name] == pytest.approx(coefficient, rel=0.05), name


def saturated(random: Random) -> StepWork:
    """Returns the work of a full step: contexts grow with the decodes, and prefill fills what is left."""
    decodes = random.randrange(60, 70)
    return StepWork(decode_tokens=decodes, decode_context=300 * decodes) + StepWork().with_prefill(256, 512 - decodes)


def test_full_steps_do_not_undo_what_calibration_told_apart() -> None:
    rng, device = Random(1), DEVICES["llama3-8b-a100"]
    true = StepTime((14.936e-3, 81.3e-6, 95.2e-6, 0.111e-6, 0.755e-6, 0.0, 0.0))
    model = calibrated(true, 512, rng, 0.02, 0.03)
    plain = StepTimeModel(PRIOR_STEP_TIME)
    for _ in range(4000):
        work = saturated(rng)
        seconds = device.seconds(work) * rng.gauss(1, 0.02)
        model.observe(work, seconds)
        plain.observe(work, seconds)
    ratio = true.coefficients[1] / true.coefficients[2]
    assert model.fitted.coefficients[1] / model.fitted.coefficients[2] == pytest.approx(ratio, rel=0.1)
    assert plain.fitted.coefficients[1] / plain.fitted.coefficients[2] != pytest.approx(ratio, rel=0.1)


def test_live_steps_decide_where_they_can_tell() -> None:
    """A device whose decodes have become half as dear again, which only live steps show."""
    rng = Random(2)
    before = StepTime((0.01, 1e-4, 1e-4, 1e-7, 1e-7, 1e-9, 0.0))
    after = StepTime((0.01, 1e-4, 1.5e-4, 1e-7, 1e-7, 1e-9, 0.0))
    model = calibrated(before, 512, rng, 0.02, 0.0)
    for _ in range(4000):
        decodes = rng.randrange(1, 200)
        work = StepWork(decode_tokens=decodes, decode_context=300 * decodes)
        if rng.random() < 0.5:
            work += StepWork().with_prefill(rng.randrange(500), rng.randrange(1, 300))
        model.observe(work, after.seconds(work) * rng.gauss(1, 0.02))
    assert 1.25e-4 < model.fitted.coefficients[2] < 1.55e-4


def test_a_machine_that_is_slower_while_it_serves_keeps_its_proportions() -> None:
    rng = Random(3)
    true = StepTime((0.01, 1e-4, 1e-4, 1e-7, 1e-7, 1e-9, 0.0))
    model = calibrated(true, 512, rng, 0.02, 0.0)
    for _ in range(1000):
        work = saturated(rng)
        model.observe(work, 1.4 * true.seconds(work) * rng.gauss(1, 0.02))
    prompt = StepWork().with_prefill(0, 256)
    assert model.fitted.seconds(prompt) == pytest.approx(1.4 * true.seconds(prompt), rel=0.05), "none was measured"


def test_newer_calibration_replaces_older() -> None:
    rng = Random(4)
    model = calibrated(StepTime((0.01, 1e-4, 1e-4, 1e-7, 1e-7, 1e-9, 0.0)), 512, rng, 0.02, 0.0)
    newer = StepTime((0.02, 3e-4, 1e-4, 1e-7, 1e-7, 1e-9, 0.0))
    for _ in range(5):
        model.calibrate([(work_of_shape(step), newer.seconds(work_of_shape(step))) for step in shapes(512)])
    assert model.fitted.coefficients[:3] == pytest.approx(newer.coefficients[:3], rel=0.02)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_not_learned_from(seconds: float) -> None:
    model = StepTimeModel(PRIOR_STEP_TIME)
    model.calibrate([(StepWork(decode_tokens=1), seconds)])
    assert model.fitted is PRIOR_STEP_TIME
