import json
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.step_times.step_time import StepTime, StepTimeModel, StepWork

TRUE = StepTime((0.0149, 81.3e-6, 95.2e-6, 0.111e-6, 0.755e-6, 0.0, 10e-6))
PRIOR = StepTime((0.005, 1e-5, 1e-5, 1e-7, 1e-7, 1e-9, 1e-6))

works = st.builds(StepWork, *[st.integers(0, 10_000)] * 5)
coefficients = st.tuples(*[st.floats(0, 1e-3)] * 7)


def some_work(rng: random.Random) -> StepWork:
    decodes = rng.randrange(192)
    work = StepWork(decode_tokens=decodes, decode_context=sum(rng.randrange(100, 2000) for _ in range(decodes)))
    return work + StepWork().with_prefill(rng.randrange(3000), rng.randrange(16, 512)) if rng.random() < 0.6 else work


def trained(outliers: float = 0.0) -> StepTimeModel:
    rng, model = random.Random(1), StepTimeModel(PRIOR)
    for _ in range(1500):
        work = some_work(rng)
        stall = 20 if rng.random() < outliers else 1
        model.observe(work, TRUE.seconds(work) * rng.gauss(1, 0.03) * stall)
    return model


def mean_error(model: StepTimeModel, rng: random.Random) -> float:
    """Of steps to come, as a share of what they take."""
    return mean(
        abs(model.fitted.seconds(work) / TRUE.seconds(work) - 1) for work in (some_work(rng) for _ in range(300))
    )


@given(coefficients, works, works, st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_more_work_never_predicts_less_time(
    values: tuple[float, ...], work: StepWork, more: StepWork, reads: tuple[float, float]
) -> None:
    model = StepTime(values, expert_reads=reads)  # type: ignore[arg-type]
    assert model.seconds(work + more) >= model.seconds(work) * (1 - 1e-12)


@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_held_out_steps_are_predicted_within_a_tenth_also_when_some_steps_stall(outliers: float) -> None:
    model, rng = trained(outliers), random.Random(2)
    assert mean_error(model, rng) < 0.1


def test_steps_that_vary_by_a_quarter_are_predicted_by_their_mean() -> None:
    model, rng = StepTimeModel(PRIOR), random.Random(3)
    seen = [(work, TRUE.seconds(work) * rng.uniform(0.57, 1.43)) for work in (some_work(rng) for _ in range(4000))]
    for work, seconds in seen:
        model.observe(work, seconds)
    predicted = sum(model.fitted.seconds(work) for work, _ in seen)
    assert predicted == pytest.approx(sum(TRUE.seconds(work) for work, _ in seen), rel=0.03)


def test_errors_are_what_is_typical_of_steps_and_are_forgotten_with_the_busy_hour() -> None:
    model, rng = trained(), random.Random(4)
    quiet = model.relative_error

    def measured(steps: int, stalled: float) -> float:
        for _ in range(steps):
            work = some_work(rng)
            model.observe(work, TRUE.seconds(work) * rng.gauss(1, 0.03) * (3 if rng.random() < stalled else 1))
        return model.relative_error

    assert measured(600, 0.3) < 0.15, "most steps do not stall"
    assert measured(200, 0.0) == pytest.approx(quiet, rel=0.4)


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_a_model_saved_under_another_load_takes_a_few_dozen_steps_to_mend(factor: float) -> None:
    saved = trained().to_json()
    saved["coefficients"] = [factor * value for value in saved["coefficients"]]
    model, rng = StepTimeModel.from_json(saved), random.Random(5)
    for _ in range(48):
        work = some_work(rng)
        model.observe(work, TRUE.seconds(work) * rng.gauss(1, 0.03))
    assert mean_error(model, rng) < 0.1 and model.relative_error < 0.15


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_machine_that_gets_faster_or_slower_as_a_whole_is_followed_at_once(factor: float) -> None:
    model, rng = trained(), random.Random(6)
    for _ in range(128):
        decodes = rng.randrange(1, 192)
        work = StepWork(decode_tokens=decodes, decode_context=500 * decodes)
        model.observe(work, factor * TRUE.seconds(work) * rng.gauss(1, 0.03))
    prompt = StepWork().with_prefill(0, 512)
    assert model.fitted.seconds(prompt) == pytest.approx(factor * TRUE.seconds(prompt), rel=0.2), "none was measured"


@given(st.lists(st.tuples(works, st.floats(1e-6, 10)), max_size=40))
def test_coefficients_stay_non_negative_for_all_measurements(steps: list[tuple[StepWork, float]]) -> None:
    model = StepTimeModel(PRIOR)
    for work, seconds in steps:
        model.observe(work, seconds)
    assert all(value >= 0 for value in model.fitted.coefficients)


def test_a_model_of_experts_is_predicted_by_the_experts_that_its_tokens_use() -> None:
    """Steps of 1 to 64 decodes of Qwen3-30B-A3B: one reads a tenth of the weights, 64 nearly all."""
    reads, rng = (0.95, 1 - 8 / 128), random.Random(4)
    true = StepTime((0.014, 8e-6, 8e-6, 1e-8, 0.0, 0.0, 0.0), expert_reads=reads)

    def error(known: tuple[float, float]) -> float:
        model = StepTimeModel(StepTime(PRIOR.coefficients, expert_reads=known))
        works = [StepWork(decode_tokens=n, decode_context=n * rng.randrange(99, 2000)) for n in [*range(1, 65)] * 20]
        rng.shuffle(works)
        for work in works:
            model.observe(work, true.seconds(work) * rng.gauss(1, 0.03))
        return max(abs(model.fitted.seconds(work) / true.seconds(work) - 1) for work in works)

    assert error(reads) < 0.05
    assert error((0.0, 0.0)) > 0.5


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_not_learned_from(seconds: float) -> None:
    model = StepTimeModel(PRIOR)
    model.observe(StepWork(decode_tokens=1), seconds)
    assert model.num_steps == 0


def test_a_later_start_begins_where_this_one_ended() -> None:
    model = trained()
    assert StepTimeModel.from_json(json.loads(json.dumps(model.to_json()))).fitted == model.fitted


@pytest.mark.parametrize("values", [(1.0,) * 6, (-1.0,) + (0.0,) * 6, (float("nan"),) + (0.0,) * 6])
def test_coefficients_that_cannot_be_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="7 finite coefficients"):
        StepTime(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"knee": 0}, {"steps": -5}, {"steps": float("nan")}, {"coefficients": [1.0]}])
def test_a_saved_model_that_no_run_wrote_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"knee|steps|coefficients"):
        StepTimeModel.from_json(trained().to_json() | wrong)
